"""Ranks that wait for a missing one report its name, and waits that cannot end well raise an error.

tests/faults tests the end of a rank's process.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.errors import RankFailedError, RankMismatchError
from lightning_zero.native.watchdog import Phase, SequenceId
from tests.helpers.beside import ranks_beside
from tests.helpers.logs import stderr, stderr_of_ranks, wait_until
from tests.helpers.watched import step, watched
from tests.ranks.pool import Ranks
from tests.ranks.report import RankFailure

Found = Callable[[Callable[..., Any]], list[Any]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, native_library: None) -> Iterator[Found]:
    """Return the results of two ranks by function, for the functions below, the longest first."""
    calls: list[Callable[..., Any]] = [overdue] if request.config.getoption("--slow") else []
    calls += [replays_and_ends, patience_changes, compiling, one_takes_a_norm, one_gathers_and_all_meet, fails]
    calls += [replays_of_two_trainings, replays_past_the_timeout, all_fail, late_to_nothing_watched, late]
    with ranks_beside(calls, at_once=4) as outcome:
        yield outcome


def late() -> str:
    with stderr_of_ranks() as said, watched() as (engine, model):
        step(engine, model)
        if dist.get_rank() == 1:
            wait_until(lambda: "Missing: rank 1" in said[0].read_text() and "for this rank" in said[1].read_text())
        step(engine, model)
        return said[dist.get_rank()].read_text()


def late_to_nothing_watched() -> str:
    with stderr_of_ranks() as said, watched() as (engine, model):
        own = said[dist.get_rank()]
        step(engine, model)
        engine.watchdog.enter(Phase.USER_CODE)  # a loop that has ended
        before = own.read_text()
        time.sleep(4)  # report_stall_after_s is 1, and all states must be still for 2 s
        assert own.read_text() == before
        engine.watchdog.enter(Phase.BETWEEN)
        if dist.get_rank() == 1:
            wait_until(lambda: all("Every rank computes" in each.read_text() for each in said))
        dist.barrier()  # as a callback may
        step(engine, model)
        return own.read_text()


def test_ranks_that_wait_in_a_collective_of_somebody_elses_are_told_where_all_are(found: Found) -> None:
    for rank, text in enumerate(found(late_to_nothing_watched)):
        assert f"Every rank computes, or waits in an operation that is not observed. This is rank {rank}" in text
        assert f"The others: rank {1 - rank}: between two steps" in text


def one_takes_a_norm() -> tuple[str, float]:
    with watched(gather_transport="auto") as (engine, model):
        step(engine, model)
        began = time.monotonic()
        try:
            if dist.get_rank() == 0:
                model.first._parameters["weight"].norm()
            step(engine, model)
            step(engine, model)
        except (RankMismatchError, RankFailedError) as error:
            return str(error), time.monotonic() - began
        return "trained on", 0.0


def test_a_norm_of_shards_on_one_rank_only_ends_soon(found: Found) -> None:
    for text, seconds in found(one_takes_a_norm):
        assert "a reduction over all of 'first.weight'" in text
        assert seconds < 20


def one_gathers_and_all_meet(seconds: float = 25.0) -> tuple[str, float]:
    """As with collectives of a device: the host returns from an all-gather, and waits in later code."""
    with watched() as (engine, model):
        step(engine, model)
        if dist.get_rank() == 0:
            with engine.watchdog.waiting("an all-gather of parameters", SequenceId.GATHER):
                pass
        began = time.monotonic()
        try:
            with engine.watchdog.waiting("a barrier", SequenceId.WORLD):
                while time.monotonic() < began + seconds:
                    engine.watchdog.check()
                    time.sleep(0.01)
        except RankMismatchError as error:
            return str(error), time.monotonic() - began
        return "", seconds


def test_hosts_that_wait_together_while_a_device_waits_alone_are_told_who_is_missing(found: Found) -> None:
    for text, seconds in found(one_gathers_and_all_meet):
        assert "Ranks wait for each other at different points" in text
        assert "Missing: rank 1, which did not join collectives that the devices of others wait for" in text
        assert seconds < 20


def replays_alone(engine: Engine) -> Tensor:
    """As if this rank's device were in a graph that holds an all-gather.

    Returns where it says how many it has ended.
    """
    with engine.watchdog.waiting("an all-gather of parameters", SequenceId.GATHER):
        pass
    native, ended = engine.watchdog.native, torch.zeros(1, dtype=torch.int64)
    native.watch_replay(ended, int(SequenceId.GATHER), native.sequence_number(int(SequenceId.GATHER)))
    return ended


def one_replays(timeout_s: float, ends_after_s: float) -> tuple[str, float]:
    with watched(timeout_s=timeout_s) as (engine, model), stderr() as said:
        step(engine, model)
        before = len(said.read_text())
        began, ended = time.monotonic(), torch.zeros(1)
        if dist.get_rank() == 0:
            ended = replays_alone(engine)
        try:
            # A busy machine may be late with the end of a wait; that nothing is ended shows at once.
            patience = 5 if ends_after_s < timeout_s else 20
            while time.monotonic() < began + timeout_s + patience:
                engine.watchdog.check()
                time.sleep(0.01)
                if time.monotonic() > began + ends_after_s and "No progress" in said.read_text()[before:]:
                    ended.fill_(1)
        except RankFailedError as error:
            return str(error), time.monotonic() - began
        return said.read_text()[before:], 0.0


def replays_past_the_timeout() -> tuple[str, float]:
    return one_replays(timeout_s=4.0, ends_after_s=60.0)


def replays_and_ends() -> tuple[str, float]:
    return one_replays(timeout_s=12.0, ends_after_s=2.0)


def test_a_replay_that_a_device_does_not_come_past_ends_at_the_timeout(found: Found) -> None:
    for text, seconds in found(replays_past_the_timeout):
        assert "A wait took longer than the timeout of 4 s. This is rank 0: between two steps" in text
        assert "its device waits in the collectives of a replayed CUDA graph" in text
        assert "Missing: rank 1." in text
        assert 4 < seconds < 24


def test_a_replay_that_ends_is_no_longer_waited_for(found: Found) -> None:
    waited, _ = found(replays_and_ends)
    assert waited[0].count("No progress. This is rank 0") == 1, waited[0]
    assert waited[1] == 0.0, "it was ended"


def replays_of_two_trainings() -> str:
    with watched() as (engine, model), stderr() as said:
        step(engine, model)
        if dist.get_rank() == 0:
            for replays in (3, 1):  # each training counts from 0
                ended = torch.zeros(1, dtype=torch.int64)
                for number in range(replays):
                    sequence_number = engine.watchdog.native.sequence_number(int(SequenceId.GATHER))
                    engine.watchdog.native.watch_replay(ended, int(SequenceId.GATHER), sequence_number)
                    ended.fill_(number + 1)
            time.sleep(5)
        dist.barrier()
        return said.read_text()


def test_replays_of_a_later_training_end_too(found: Found) -> None:
    assert "a replayed CUDA graph" not in found(replays_of_two_trainings)[0]


def fails_while_its_device_waits() -> None:
    with watched() as (engine, model):
        step(engine, model)
        if dist.get_rank() == 0:
            replays_alone(engine)
            engine.watchdog.fail(ValueError("the third batch is empty"))
            time.sleep(40)  # as a call that waits for the device


@pytest.mark.exhaustive  # a replay past the timeout ends likewise
def test_a_rank_that_has_failed_does_not_wait_for_its_device_for_ever(ranks: Ranks) -> None:
    begun = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, fails_while_its_device_waits, deadline=60)
    assert "its device waits for other ranks that do not arrive. It is killed now. This is rank 0" in str(caught.value)
    assert time.monotonic() - begun < 35


def test_a_rank_that_is_late_is_named_on_every_rank_and_waited_for(found: Found) -> None:
    waiting, slow = found(late)
    assert "Missing: rank 1" in waiting
    assert "waits in an all-gather of parameters" in waiting
    assert "rank 1: between two steps" in waiting
    assert "No progress. This is rank 1: between two steps" in slow
    assert "Waiting for this rank: rank 0. The others: rank 0: forward of training batch 2" in slow


def patience_changes() -> tuple[str, str, str]:
    """Return the messages after a wait of a patient rank, after the same wait of an impatient one, and of a patient one
    again.
    """
    with watched(report_s=30.0) as (engine, model), stderr() as said:
        step(engine, model)
        patient = engine.config
        with engine.watchdog.waiting("something of the others"):
            time.sleep(3)
            first = said.read_text()
            engine.configure(replace(patient, tuning=replace(patient.tuning, report_stall_after_s=1.0)))
            wait_until(lambda: said.read_text().endswith("\n"))
            engine.configure(patient)
        second = said.read_text()
        with engine.watchdog.waiting("more"):
            time.sleep(3)
        return first, second, said.read_text()


def test_a_later_trainers_time_until_a_report_counts_from_then_on(found: Found) -> None:
    for rank, (first, second, third) in enumerate(found(patience_changes)):
        assert first == ""
        assert f"No progress. This is rank {rank}" in second
        assert "something of the others" in second
        assert third == second


def compiling() -> str:
    with stderr_of_ranks() as said, watched() as (engine, model):
        own = said[dist.get_rank()]
        step(engine, model)
        before = len(own.read_text())
        if dist.get_rank() == 1:
            with engine.watchdog.busy("compiling a graph"):
                wait_until(lambda: "compiling a graph for" in said[0].read_text())
                time.sleep(2)  # several polls of this rank's watchdog
                text = own.read_text()
        step(engine, model)
        return (text if dist.get_rank() == 1 else own.read_text())[before:]


def test_a_rank_that_compiles_is_reported_as_that_and_blamed_for_nothing(found: Found) -> None:
    waiting, busy = found(compiling)
    assert "rank 1: between two steps" in waiting
    assert "compiling a graph for" in waiting
    assert busy == ""


def fails() -> tuple[str, float]:
    with watched() as (engine, model):
        step(engine, model)
        if dist.get_rank() == 1:
            engine.watchdog.fail(ValueError("the third batch is empty"))
            time.sleep(6)  # as a way out that takes its time
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            step(engine, model)
        return str(caught.value), time.monotonic() - begun


def test_a_failure_on_one_rank_ends_the_waits_of_the_others(found: Found) -> None:
    (text, seconds), _ = found(fails)
    assert "Rank 1 failed: ValueError: the third batch is empty" in text
    assert "This is rank 0: forward of training batch 2" in text
    assert seconds < 40, "the timeout of 60 s"


def all_fail() -> None:
    with watched() as (engine, model):
        step(engine, model)
        engine.watchdog.fail(ValueError("on every rank"))
        time.sleep(5)
        engine.watchdog.begin()
        step(engine, model)


def test_what_all_ranks_failed_at_is_over_when_they_begin_again(found: Found) -> None:
    found(all_fail)


def overdue() -> tuple[str, float]:
    with watched(timeout_s=5) as (engine, model):
        step(engine, model)
        over = Path("over")
        if dist.get_rank() == 1:
            wait_until(over.exists)
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            step(engine, model)
        over.touch()
        return str(caught.value), time.monotonic() - begun


@pytest.mark.slow
def test_the_timeout_ends_a_wait_with_the_names_of_who_is_missing(found: Found) -> None:
    (text, seconds), _ = found(overdue)
    assert "longer than the timeout of 5 s" in text
    assert "Missing: rank 1" in text
    assert seconds > 5
