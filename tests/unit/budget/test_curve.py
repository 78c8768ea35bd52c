"""Curves, by hand."""

from math import inf

import pytest

from lightning_zero.budget.curve import CHARTED, Curve, Point, agreed, nested, told


def straight(saved: float, besides: float = 0.0) -> Curve:
    """All of what is saved is at the peak, too."""
    return Curve(tuple(Point(budget, saved * budget, saved * budget + besides) for budget in CHARTED))


def test_between_points_it_is_a_line_and_beyond_them_level() -> None:
    curve = Curve((Point(0.2, 2, 9), Point(0.6, 4, 7), Point(1.0, 12, 13)))
    assert [curve.at(budget) for budget in (0.2, 0.6, 1.0)] == list(curve.points)
    assert curve.at(0.8) == Point(0.8, 8, 10)
    assert curve.at(0.5).peak == pytest.approx(7.5)
    assert curve.at(0.1) == Point(0.1, 2, 9)
    assert curve.at(1.5) == Point(1.5, 12, 13)
    assert curve.more(1.0, 0.6) == -curve.more(0.6, 1.0) == 6
    assert Curve(curve.points[:1]).at(0.7) == Point(0.7, 2, 9)


def test_a_graph_finds_there_what_those_before_it_have_saved() -> None:
    first, second = straight(10, besides=4), straight(2, besides=1)
    both = nested([first, second])
    assert both is not None
    for budget in CHARTED:
        assert both.at(budget).saved == pytest.approx(12 * budget)
        assert both.at(budget).peak == pytest.approx(max(10 * budget + 4, 12 * budget + 1))
    assert nested([first]) == first


def test_of_nothing_and_of_other_budgets_there_is_none() -> None:
    assert nested([]) is None
    assert nested([straight(1), Curve(straight(1).points[1:])]) is None


def test_what_lies_elsewhere_is_off_the_peak() -> None:
    gone = straight(10, besides=1).without(lambda budget: min(4 * budget, 3))
    assert gone.at(0.5) == Point(0.5, 3, 4)
    assert gone.at(1.0) == Point(1.0, 7, 8)


def test_ranks_agree_on_the_most_of_each_or_on_none() -> None:
    mine, others = straight(10, besides=1), straight(8, besides=4)
    most = agreed([max(pair) for pair in zip(told(mine), told(others), strict=True)])
    assert most is not None
    assert most.at(1.0) == Point(1.0, 10, 12)
    assert agreed(told(mine)) == mine
    assert agreed(told(None)) is None
    assert agreed([max(pair) for pair in zip(told(mine), told(None), strict=True)]) is None
    assert inf not in told(mine)
