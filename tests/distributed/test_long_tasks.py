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

Found = Callable[[Callable[..., Any]], list[Any]]


@pytest.fixture(scope="module")
def found(native_library: None) -> Iterator[Found]:
    with ranks_beside([goes_on, goes_on_after_its_last_gather, stops], at_once=3) as outcome:
        yield outcome


def _told(work: Callable[[Any], None]) -> tuple[str, str, float]:
    """Return the messages while rank 0 works and both ranks meet, the end, and its time."""
    with watched(report_s=2.0, timeout_s=5.0) as (engine, model), stderr() as said:
        step(engine, model)
        begun, error = time.monotonic(), ""
        try:
            work(engine.checkpoints)
        except RankFailedError as caught:
            error = str(caught)
        return said.read_text(), error, time.monotonic() - begun


def _moves(checkpoints: Any, seconds: float) -> None:
    with checkpoints.progress("Saving x.ckpt", "written", 2**30) as wrote:
        for _ in range(round(seconds / 0.5)):
            wrote(2**26)
            time.sleep(0.5)


def goes_on() -> tuple[str, str, float]:
    return _told(lambda checkpoints: checkpoints.ranks.run_on_rank0(SAVING, lambda: _moves(checkpoints, 8.0)))


def goes_on_after_its_last_gather() -> tuple[str, str, float]:
    """Copies to the host follow those from other devices: the other ranks are at the next place already."""

    def work(checkpoints: Any) -> None:
        if dist.get_rank() == 0:
            _moves(checkpoints, 8.0)
        checkpoints.ranks.run_on_rank0(SAVING, lambda: None)

    return _told(work)


@pytest.mark.parametrize("work", [goes_on, goes_on_after_its_last_gather])
def test_a_task_may_take_longer_than_the_timeout(found: Found, work: Callable[[], Any]) -> None:
    for said, error, seconds in found(work):
        assert (said, error) == ("", "")
        assert seconds > 7.0


def stops() -> tuple[str, str, float]:
    def work(checkpoints: Any) -> None:
        with checkpoints.progress("Saving x.ckpt", "written", 2**30) as wrote:
            wrote(2**28)
            wrote(2**28)
            wrote(0)
            for _ in range(200):  # as a disk that has gone
                time.sleep(0.1)
                checkpoints.ranks._watchdog.check()

    return _told(lambda checkpoints: checkpoints.ranks.run_on_rank0(SAVING, lambda: work(checkpoints)))


def test_one_that_stops_is_reported_with_how_far_it_is_and_ends_at_the_timeout(found: Found) -> None:
    (writer, _, _), (waiting, error, seconds) = found(stops)
    assert "No progress. This is rank 0: " in writer
    assert "No progress. This is rank 1: " in waiting
    for text in (writer, waiting, error):
        assert "tries to save x.ckpt for" in text
        assert "saving x.ckpt (256.0 MiB of 1.00 GiB written)" in text
    assert "without progress for" in error
    assert "A wait took longer than the timeout of 5 s. This is rank 1" in error
    assert "Missing: rank 0" in error
    assert 5 < seconds < 15
