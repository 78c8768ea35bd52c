"""The injector itself: it finds functions, notices events, and restores everything."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.faults.actions import ACTIONS, Planned, Skip
from tests.faults.cases import CASES, GPU_CASES
from tests.faults.injector import find
from tests.faults.job import HOWS, SHARED_MEMORY, Job, NeverReached, Outcome
from tests.faults.points import POINTS
from tests.faults.records import Rank
from tests.faults.spec import Fault, Orders, Training
from tests.faults.verdict import Case, about, judge, names
from tests.ranks import processes

pytestmark = pytest.mark.usefixtures("native_library")


def test_there_are_many_points() -> None:
    assert len(POINTS) >= 20
    assert all(point.what and point.targets for point in POINTS.values())


@pytest.mark.parametrize("name", POINTS)
def test_what_a_point_wraps_is_there(name: str) -> None:
    for target in POINTS[name].targets:
        owner, attribute = find(target)
        assert callable(getattr(owner, attribute))


@pytest.mark.parametrize("target", ["no.such.module:f", "lightning_zero.engine:Engine.fly", "json:Encoder.x"])
def test_what_is_gone_is_an_error(target: str) -> None:
    with pytest.raises(LookupError, match=re.escape(f"{target} is not there")):
        find(target)


def test_cases_are_distinct_and_name_what_there_is() -> None:
    for cases in (CASES, GPU_CASES):
        assert len(set(map(str, cases))) == len(cases)
        for case in cases:
            for fault in filter(None, (case.fault, case.meanwhile)):
                assert fault.action in ACTIONS
                assert fault.point in POINTS
                assert max(fault.ranks) < case.world
    assert {case.fault.point for case in CASES} == set(POINTS), "a point that nothing is tried at"
    # `device_assert` needs a device
    assert {case.fault.action for case in CASES} == set(ACTIONS) - {"device_assert"}
    assert len({(case.fault.action, case.fault.point) for case in GPU_CASES}) >= 20
    assert {case.how for case in CASES} == set(HOWS)


def test_orders_travel() -> None:
    orders = Orders(
        "here", Training(options={"a": 1}), Fault("raise", "forward", (0, 2), 3), Fault("hang", "clip", (1,))
    )
    assert Orders.loads(orders.dumps()) == orders


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("raise", Planned),
        ("cuda_error", RuntimeError),
        ("out_of_memory", torch.OutOfMemoryError),
        ("exit", SystemExit),
        ("skip", Skip),
    ],
)
def test_actions_raise(action: str, expected: type[BaseException]) -> None:
    with pytest.raises(expected):
        ACTIONS[action]("here", Fault(action, "forward"))


# -- jobs


@contextmanager
def job(training: Training, *arguments: Any, **options: Any) -> Iterator[Job]:
    with Job(training, *arguments, forked=True, **options) as made:
        yield made
        shutil.rmtree(made.home)


def nothing_left(made: Job) -> None:
    assert all(processes.ended(rank.pid) for rank in made.ranks)
    for session in made._sessions:
        assert not processes.members(session)
    assert not made.memory.exists()
    assert not [path.name for path in SHARED_MEMORY.glob("*") if path.name == made.memory.name]


def test_a_job_without_a_fault_ends_well() -> None:
    with job(Training(workers=1)) as made:
        outcome = made.run(limit_s=120)
        assert (made.home / "last.ckpt").exists()
    assert [(rank.code, rank.has("trained")) for rank in outcome.ranks] == [(0, True)] * 2, outcome.ranks[0].text
    assert not outcome.left
    assert not outcome.memory
    nothing_left(made)


def test_a_point_that_is_never_reached_is_an_error() -> None:
    with (
        job(Training(steps=2), Fault("raise", "forward", (1,), 99)) as made,
        pytest.raises(NeverReached, match="raise at forward did not happen"),
    ):
        made.run(limit_s=5)
    nothing_left(made)


def test_the_deadline_ends_ranks_and_whatever_they_started() -> None:
    with job(Training(workers=1), Fault("hang_holding_the_gil", "batch_end", (0, 1))) as made:
        outcome = made.run(limit_s=2)
        assert outcome.seconds is None
        assert [rank.over for rank in outcome.ranks] == [False, False]
    nothing_left(made)
    assert "_hang_holding_the_gil" in outcome.ranks[0].stacks, "nobody can tell where the ranks were"


@pytest.mark.exhaustive
def test_a_rank_that_sleeps_goes_on() -> None:
    with job(Training(), Fault("sleep", "forward", seconds=0.5)) as made:
        outcome = made.run(limit_s=60)
    assert [rank.code for rank in outcome.ranks] == [0, 0], outcome.ranks[1].text
    assert outcome.ranks[1].has("went on")
    assert not outcome.ranks[0].has("fired")


def test_a_fault_waits_for_what_others_are_at() -> None:
    with job(Training(), Fault("exit_at_once", "batch_end"), meanwhile=Fault("hang_in_c", "batch_end", (0,))) as made:
        outcome = made.run(limit_s=1)
    busy = [event["at"] for event in outcome.ranks[0].events if event["what"] == "busy"]
    fired = [event["at"] for event in outcome.ranks[1].events if event["what"] == "fired"]
    assert len(busy) == len(fired) == 1
    assert fired[0] > busy[0]
    assert outcome.ranks[1].code == 3


# -- verdicts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Rank 1 did not come", True),
        ("waits for ranks 0, 1 and 3", True),
        ("[rank: 1] Child process ended", True),
        ("rank=1", False),
        ("rank 10 waits 1 s", False),
        ("rank 1.5", False),
        ("ranks 0 and 2", False),
        ("1 rank", False),
    ],
)
def test_names_a_rank(text: str, found: bool) -> None:
    assert bool(names(1).search(text)) is found


def ended(number: int, err: str, code: int | None = 1, seconds: float | None = 1.0, **at: float) -> Rank:
    rank = Rank(Path("nowhere"), number)
    rank.printed["err"], rank.code, rank.seconds, rank.over = err, code, seconds, seconds is not None
    rank.at = rank.slept = dict(at)
    return rank


TRACE = "Traceback (most recent call last):\n[rank1]: tests.faults.actions.Planned: planned, at forward on rank 1\n"
GOOD: Callable[[], list[Rank]] = lambda: [ended(0, "Rank 1 failed in forward"), ended(1, TRACE)]  # noqa: E731


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (GOOD(), ""),
        ([ended(0, "Rank 1 failed", code=0), GOOD()[1]], "rank 0 ended with status 0"),
        ([ended(0, "Rank 1 failed", None, None), GOOD()[1]], "rank 0 was still there after 30 s"),
        ([ended(0, "Connection closed by peer"), GOOD()[1]], "rank 0 does not name who failed"),
        ([GOOD()[0], ended(1, "")], "rank 1: its own traceback is missing"),
        ([GOOD()[0], ended(1, TRACE, trace=9.0)], "rank 1: its traceback came after 9 s only"),
    ],
)
def test_judges(ranks: list[Rank], complaint: str) -> None:
    case = Case(Fault("raise", "forward"), Training())
    assert judge(case, Outcome(ranks)) == ([complaint] if complaint else [])
    assert judge(case, Outcome(ranks, ["7 python"], ["lightning_zero_x"]))[-2:] == [
        "left behind: 7 python",
        "left in shared memory: lightning_zero_x",
    ]


NAMED = "Planned: planned, at forward on rank 0 (traceback: printed by rank 1)\n"


@pytest.mark.parametrize(
    ("first", "complaints"),
    [
        (NAMED, []),
        (TRACE, ["ranks [0, 1] show one exception each"]),
        ("Planned: planned, at forward on rank 0\n", ["rank 0: its own traceback is missing"]),
    ],
)
def test_judges_that_ranks_show_one_exception_once(first: str, complaints: list[str]) -> None:
    case = Case(Fault("raise", "forward", (0, 1)), Training())
    assert judge(case, Outcome([ended(0, first), ended(1, TRACE)])) == complaints


def test_judges_who_was_killed() -> None:
    case = Case(Fault("sigkill", "forward"), Training())
    killed = [ended(0, "Rank 1 is gone", code=-9), ended(1, "", code=-9)]
    assert judge(case, Outcome(killed)) == ["rank 0 was killed by SIGKILL"]


def test_judges_when_a_rank_was_named() -> None:
    case = Case(Fault("hang", "forward"), Training(), named_within_s=35)
    late = ended(0, "Rank 1 is missing", **{"names 1": 42.0})
    assert judge(case, Outcome([late, ended(1, "")])) == ["rank 0 names who failed after 42 s only"]
    assert judge(case, Outcome([ended(0, "Rank 1 is missing", **{"names 1": 31.0}), ended(1, "")])) == []


def test_tells_what_ranks_printed() -> None:
    case: Any = SimpleNamespace(fault=Fault("raise", "forward"))
    good = GOOD()
    assert about(good[0], case) == "Rank 1 failed in forward"
    assert about(good[1], case) == "tests.faults.actions.Planned: planned, at forward on rank 1"
    assert (
        about(ended(0, "[rank0]: Traceback\n[rank0]:   File\n[rank0]: RuntimeError: gone\n"), case)
        == "RuntimeError: gone"
    )
    assert about(ended(0, ""), case) == ""
