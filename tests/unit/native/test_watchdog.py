"""Test that ranks that fail print each exception once, with the ranks that share it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_zero.native import watchdog as failures
from lightning_zero.native.watchdog import Failures, ShownErrorHook
from tests.helpers.simulated_clock import SimulatedClock

TRACE = "Traceback (most recent call last)"


def _caught(kind: type[Exception], text: str) -> Exception:
    try:
        raise kind(text)
    except kind as error:
        return error


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards


def shown(errors: dict[int, Exception], world: int, capsys: Any, late: tuple[int, ...] = ()) -> str:
    """Return the output of ranks that fail, at once except for late ones."""
    store, clock = dist.HashStore(), SimulatedClock()
    ranks = [Failures(store, rank, world) for rank in range(world)]

    def fail(rank: int) -> None:
        clock.sleep(failures.TO_POST_S + failures.TO_CLAIM_S if rank in late else 0.0)
        ranks[rank].show(errors[rank])

    with patch.object(failures, "time", clock):
        clock.run([partial(fail, rank) for rank in errors])
    return capsys.readouterr().err


def test_one_that_all_ranks_share_is_shown_once(capsys: Any) -> None:
    texts = ["rank {}: cuda:{} at 0x7f0{}, tensor of device {} of process {}"] * 3
    errors = {rank: _caught(ValueError, text.format(*[rank] * 5)) for rank, text in enumerate(texts)}
    text = shown(errors, 3, capsys)
    assert "[lightning_zero, rank 0] Ranks 0, 1 and 2 failed with one exception:" in text
    assert text.count(TRACE) == 1
    assert text.count("[lightning_zero, rank") == 1


def test_different_ones_are_shown_once_each(capsys: Any) -> None:
    errors: dict[int, Exception] = {rank: _caught(ValueError, "first") for rank in (0, 2)}
    errors |= {1: _caught(ValueError, "second"), 3: _caught(TypeError, "first")}
    text = shown(errors, 5, capsys)
    assert text.count(TRACE) == 3
    assert "rank 0] Ranks 0 and 2 failed with one exception:" in text
    assert "rank 1] Rank 1 failed:" in text
    assert "rank 3] Rank 3 failed:" in text


def test_one_that_comes_late_is_only_named(capsys: Any) -> None:
    errors = {rank: _caught(ValueError, "shared") for rank in range(3)}
    text = shown(errors, 3, capsys, late=(0,))
    assert "rank 1] Ranks 1 and 2 failed with one exception:" in text
    assert "[lightning_zero, rank 0] Failed, too, as rank 1 shows." in text
    assert text.count(TRACE) == 1


def test_in_another_stage_it_is_shown_again(capsys: Any) -> None:
    ours, clock = Failures(dist.HashStore(), 0, 2), SimulatedClock()

    def show(error: Exception) -> None:
        clock.run([partial(ours.show, error)])

    with patch.object(failures, "time", clock):
        for _ in range(2):
            ours.begin()
            show(_caught(ValueError, "shared"))
        assert capsys.readouterr().err.count(TRACE) == 2
        error = _caught(ValueError, "of two engines")
        show(error)
        show(error)
    assert capsys.readouterr().err.count(TRACE) == 1


def test_without_a_store_each_rank_shows_its_own(capsys: Any) -> None:
    class Gone:
        def clone(self) -> Gone:
            return self

        def set_timeout(self, _: Any) -> None: ...

        def set(self, *_: Any) -> bool:
            raise dist.DistNetworkError("connection reset")

        check = set

    store: Any = Gone()
    ours = Failures(store, 1, 2)
    ours.acknowledge()
    ours.wait_until_acknowledged()
    ours.show(_caught(ValueError, "alone"))
    assert "rank 1] Rank 1 failed:" in capsys.readouterr().err


def test_the_end_of_a_process_only_names_what_was_shown(capsys: Any) -> None:
    called: list[BaseException] = []
    default = sys.__excepthook__

    def users(kind: Any, error: BaseException, trace: Any) -> None:
        called.append(error)
        default(kind, error, trace)

    sys.excepthook = users
    errors = {rank: _caught(ValueError, "shared\nsecond line") for rank in range(2)}
    other = _caught(TypeError, "another")
    shown(errors, 2, capsys)
    assert isinstance(sys.excepthook, ShownErrorHook)
    said: Callable[[Exception], None] = lambda error: sys.excepthook(type(error), error, error.__traceback__)  # noqa: E731
    said(errors[0])
    assert capsys.readouterr().err == "ValueError: shared (traceback: above)\n"
    said(errors[1])
    assert capsys.readouterr().err == "ValueError: shared (traceback: printed by rank 0)\n"
    said(other)
    assert TRACE in capsys.readouterr().err
    assert called == [*errors.values(), other], "a hook that reports errors elsewhere must get them"


def test_the_rank_that_serves_the_store_waits_until_the_others_know_but_not_for_ever() -> None:
    store = dist.HashStore()
    first, second, third = (Failures(store, rank, 3) for rank in range(3))
    second.acknowledge()
    third.acknowledge()
    with patch.object(failures, "time", clock := SimulatedClock()):
        clock.run([first.wait_until_acknowledged])
        assert clock.monotonic() == 0
        first.begin()
        clock.run([first.wait_until_acknowledged])
    assert failures.TO_HEAR_S <= clock.monotonic() < failures.TO_HEAR_S + 1
