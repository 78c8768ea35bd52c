"""Ranks wait for a rank that reports progress as long as it progresses, and no longer."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.errors import RankFailedError
from tests.helpers.beside import ranks_beside
from tests.helpers.logs import stderr
from tests.helpers.watched import step, watched

SAVING = "save x.ckpt"

REPORT_S, TIMEOUT_S = 2.0, 10.0  # of gloo, too: a shorter one may pass while a busy machine starts the ranks

Found = Callable[[Callable[..., Any]], list[Any]]
Told = tuple[str, str, float, float]


@pytest.fixture(scope="module")
def found(native_library: None) -> Iterator[Found]:
    with ranks_beside([goes_on, goes_on_after_its_last_gather, stops], at_once=3) as outcome:
        yield outcome


def _told(work: Callable[[Any], float | None]) -> Told:
    """Return the messages while rank 0 works and both ranks meet, the end, its time, and the result of ``work``."""
    with watched(report_s=REPORT_S, timeout_s=TIMEOUT_S) as (engine, model), stderr() as said:
        step(engine, model)
        begun, error, found = time.monotonic(), "", None
        try:
            found = work(engine.checkpoints)
        except RankFailedError as caught:
            error = str(caught)
        return said.read_text(), error, time.monotonic() - begun, found or 0.0


def _moves(checkpoints: Any, seconds: float) -> float:
    """Return the longest time without progress, which is long on a busy machine only."""
    moved, pauses = time.monotonic(), []
    with checkpoints.progress("Saving x.ckpt", "written", 2**30) as wrote:
        for _ in range(round(seconds / 0.5)):
            wrote(2**26)
            time.sleep(0.5)
            pauses.append(time.monotonic() - moved)
            moved += pauses[-1]
    return max(pauses)


def goes_on() -> Told:
    return _told(lambda checkpoints: checkpoints.ranks.run_on_rank0(SAVING, lambda: _moves(checkpoints, TIMEOUT_S + 3)))


def goes_on_after_its_last_gather() -> Told:
    """Copies to the host follow those from other devices: the other ranks are at the next place already."""

    def work(checkpoints: Any) -> float:
        pause = _moves(checkpoints, TIMEOUT_S + 3) if dist.get_rank() == 0 else 0.0
        checkpoints.ranks.run_on_rank0(SAVING, lambda: None)
        return pause

    return _told(work)


@pytest.mark.parametrize("work", [goes_on, goes_on_after_its_last_gather])
def test_a_task_may_take_longer_than_the_timeout(found: Found, work: Callable[[], Any]) -> None:
    outcomes = found(work)
    pause = max(outcome[3] for outcome in outcomes)
    for said, error, seconds, _ in outcomes:
        assert said == "" or pause > REPORT_S - 1
        assert error == "" or pause > TIMEOUT_S - 1
        assert seconds > TIMEOUT_S + 2


def stops() -> Told:
    def work(checkpoints: Any) -> None:
        with checkpoints.progress("Saving x.ckpt", "written", 2**30) as wrote:
            wrote(2**28)
            wrote(2**28)
            wrote(0)
            for _ in range(300):  # as a disk that has gone
                time.sleep(0.1)
                checkpoints.ranks._watchdog.check()

    return _told(lambda checkpoints: checkpoints.ranks.run_on_rank0(SAVING, lambda: work(checkpoints)))


def test_one_that_stops_is_reported_with_how_far_it_is_and_ends_at_the_timeout(found: Found) -> None:
    (writer, *_), (waiting, error, seconds, _) = found(stops)
    assert "No progress. This is rank 0: " in writer
    assert "No progress. This is rank 1: " in waiting
    for text in (writer, waiting, error):
        assert "tries to save x.ckpt for" in text
        assert "saving x.ckpt (256.0 MiB of 1.00 GiB written)" in text
    assert "without progress for" in error
    assert "A wait took longer than the timeout of 10 s. This is rank 1" in error
    assert "Missing: rank 0" in error
    assert TIMEOUT_S < seconds < 28, "rank 0 goes on for 30 s"
