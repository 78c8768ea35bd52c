"""Where a graph is cut: alike in each repetition, and where little has to go through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_zero.compile.subgraphs.cut import choose_cut_points
from lightning_zero.compile.subgraphs.repeats import RepeatedRun

LENGTH = 36
WRITTEN = 50_000  # bytes, of which 50 may be lost at a seam
MIDDLE = RepeatedRun(6, 26, 10)


class NodeOrder:
    """Of so much work: ``lost`` says for each place what a seam there loses, or None where there can be none."""

    def __init__(
        self, lost: Callable[[int], float | None] = lambda place: 0, effort: Callable[[int], int] = lambda place: 1
    ) -> None:
        self.work = range(LENGTH)
        self._lost, self._effort = lost, effort

    def cut_points(self) -> list[int]:
        return [place for place in range(1, LENGTH) if self._lost(place) is not None]

    def lost(self) -> list[float]:
        return [self._lost(place) or 0 for place in range(LENGTH + 1)]

    def effort(self) -> list[int]:
        return [self._effort(place) for place in range(LENGTH)]

    def written(self) -> int:
        return WRITTEN


def chosen(
    order: Any, runs: Sequence[RepeatedRun] = (MIDDLE,), between: Sequence[int] = (), parts: int = 1
) -> list[int]:
    return choose_cut_points(order, runs, between, parts)


@pytest.mark.parametrize(
    ("parts", "seams"), [(1, [6, 16, 26]), (2, [6, 11, 16, 21, 26]), (5, [6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26])]
)
def test_each_repetition_is_cut_alike_into_equal_parts(parts: int, seams: list[int]) -> None:
    assert chosen(NodeOrder(), parts=parts) == seams


def test_parts_are_equal_in_effort_not_in_length() -> None:
    heavy = NodeOrder(effort=lambda place: 10 if place % 10 == 3 else 1)  # of 19, 7 come before it
    assert chosen(heavy, parts=2) == [6, 13, 16, 23, 26]


def test_a_repetition_that_is_cut_short_has_the_places_that_it_comes_to() -> None:
    assert chosen(NodeOrder(), [RepeatedRun(6, 31, 10)], parts=2) == [6, 11, 16, 21, 26, 31]
    assert chosen(NodeOrder(), [RepeatedRun(6, 30, 10)], parts=2) == [6, 11, 16, 21, 26]


def test_neither_end_is_a_seam() -> None:
    assert chosen(NodeOrder(), [RepeatedRun(0, 36, 12)]) == [12, 24]


@pytest.mark.parametrize(
    ("lost", "seams"),
    [
        ({9: 50, 4: 60}, [9, 19]),  # next to nothing
        ({9: 50, 4: 40}, [9, 14, 19, 24]),
        ({9: 51, 4: 60}, [9, 19]),  # or as little as can be
        ({9: 61, 4: 60}, [14, 24]),
        ({8: 60, 9: 60}, [8, 18]),  # the first of equals
    ],
)
def test_a_seam_loses_next_to_nothing_or_as_little_as_can_be(lost: dict[int, int], seams: list[int]) -> None:
    assert chosen(NodeOrder(lambda place: lost.get(place % 10)), parts=3) == seams


def test_the_repetition_in_the_middle_stands_for_all() -> None:
    assert chosen(NodeOrder(lambda place: 0 if place in (19, 34) else 60), [RepeatedRun(6, 36, 10)]) == [9, 19, 29]


def test_where_there_can_be_no_seam_there_is_none() -> None:
    assert chosen(NodeOrder(lambda place: None), between=[3, 12, 30], parts=4) == []


def test_what_does_not_repeat_is_cut_before_what_runs_between() -> None:
    assert chosen(NodeOrder(), between=[0, 1, 3, 9, 25, 30]) == [1, 3, 6, 16, 26, 30]
    # At the nearest place before it where little is lost.
    order = NodeOrder(lambda place: 0 if place in (1, 2, 4, 6, 16, 28, 31) else 1000)
    assert chosen(order, between=[3, 30]) == [2, 6, 16, 26, 28]


def test_between_two_runs_places_are_those_of_neither() -> None:
    runs = [RepeatedRun(0, 12, 6), RepeatedRun(20, 32, 6)]
    assert chosen(NodeOrder(), runs, between=[5, 15, 22, 34]) == [6, 12, 15, 20, 26, 32, 34]
