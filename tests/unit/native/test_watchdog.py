"""Test that ranks that fail print each exception once, with the ranks that share it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.native import watchdog as failures
from lightning_zero.native.watchdog import Failures, ShownErrorHook

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
    store = dist.HashStore()
    ranks = [Failures(store, rank, world) for rank in range(world)]

    def fail(rank: int) -> None:
        time.sleep(0.6 if rank in late else 0.0)
        ranks[rank].show(errors[rank])

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(fail, errors))
    return capsys.readouterr().err


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TO_POST_S", 0.3)


def test_one_that_all_ranks_share_is_shown_once(capsys: Any) -> None:
    texts = ["rank {}: cuda:{} at 0x7f0{}, tensor of device {} of process {}"] * 3
    errors = {rank: _caught(ValueError, text.format(*[rank] * 5)) for rank, text in enumerate(texts)}
    text = shown(errors, 3, capsys)
    assert "[lightning_zero, rank 0] Ranks 0, 1 and 2 failed with one exception:" in text
    assert text.count(TRACE) == 1
    assert text.count("[lightning_zero, rank") == 1


@pytest.mark.usefixtures("_soon")
def test_different_ones_are_shown_once_each(capsys: Any) -> None:
    errors: dict[int, Exception] = {rank: _caught(ValueError, "first") for rank in (0, 2)}
    errors |= {1: _caught(ValueError, "second"), 3: _caught(TypeError, "first")}
    text = shown(errors, 5, capsys)
    assert text.count(TRACE) == 3
    assert "rank 0] Ranks 0 and 2 failed with one exception:" in text
    assert "rank 1] Rank 1 failed:" in text
    assert "rank 3] Rank 3 failed:" in text


@pytest.mark.usefixtures("_soon")
def test_one_that_comes_late_is_only_named(capsys: Any) -> None:
    errors = {rank: _caught(ValueError, "shared") for rank in range(3)}
    text = shown(errors, 3, capsys, late=(0,))
    assert "rank 1] Ranks 1 and 2 failed with one exception:" in text
    assert "[lightning_zero, rank 0] Failed, too, as rank 1 shows." in text
    assert text.count(TRACE) == 1


@pytest.mark.usefixtures("_soon")
def test_in_another_stage_it_is_shown_again(capsys: Any) -> None:
    ours = Failures(dist.HashStore(), 0, 2)
    for _ in range(2):
        ours.begin()
        ours.show(_caught(ValueError, "shared"))
    assert capsys.readouterr().err.count(TRACE) == 2
    error = _caught(ValueError, "of two engines")
    ours.show(error)
    ours.show(error)
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


@pytest.mark.usefixtures("_soon")
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


def test_the_rank_that_serves_the_store_waits_until_the_others_know() -> None:
    store = dist.HashStore()
    first, second, third = (Failures(store, rank, 3) for rank in range(3))
    second.acknowledge()
    third.acknowledge()
    begun = time.monotonic()
    first.wait_until_acknowledged()
    assert time.monotonic() - begun < 1
