"""During a compilation Python does not look through all objects for garbage, and does so as before when it is over."""

import gc
import weakref
from typing import Any

import pytest

from lightning_zero.compile.fast_compile import only_young_searched


class Ring:
    def __init__(self) -> None:
        self.own = self


def searches(count: int) -> list[int]:
    """Generations that are searched while so many objects are made, all of which stay."""
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


def test_the_youngest_objects_are_searched_and_not_all() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(10, 2, 2)
        gc.collect()
        assert 2 in searches(1_000_000), "otherwise all are"
        with pytest.raises(ZeroDivisionError), only_young_searched():
            with only_young_searched():
                pass
            assert set(searches(1_000_000)) == {0}
            garbage = weakref.ref(Ring())
            searches(1000)
            assert garbage() is None
            raise ZeroDivisionError
        assert gc.get_threshold() == (10, 2, 2)
    finally:
        gc.set_threshold(*before)


def test_a_search_that_somebody_has_switched_off_stays_off() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with only_young_searched():
            assert searches(100_000) == []
    finally:
        gc.set_threshold(*before)
