"""During a compilation Python collects the youngest objects only."""

import gc
import weakref
from typing import Any

import pytest

from lightning_zero.compat.compiler import collect_young_only


class Ring:
    def __init__(self) -> None:
        self.own = self


def searches(count: int) -> list[int]:
    """Return the generations that Python collects while it makes this many live objects."""
    seen: list[int] = []

    def note(phase: str, details: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(details["generation"])

    gc.callbacks.append(note)
    try:
        made = [[None] for _ in range(count)]
        assert len(made) == count
    finally:
        gc.callbacks.remove(note)
    return seen


def test_only_the_youngest_objects_are_collected() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(10, 2, 2)
        gc.collect()
        assert 2 in searches(1_000_000), "a full collection"
        with pytest.raises(ZeroDivisionError), collect_young_only():
            with collect_young_only():
                pass
            assert set(searches(1_000_000)) == {0}
            garbage = weakref.ref(Ring())
            searches(1000)
            assert garbage() is None
            raise ZeroDivisionError
        assert gc.get_threshold() == (10, 2, 2)
    finally:
        gc.set_threshold(*before)


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with collect_young_only():
            assert searches(100_000) == []
    finally:
        gc.set_threshold(*before)
