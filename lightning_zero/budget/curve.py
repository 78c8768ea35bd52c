"""What passes take at their peak under each budget of activations, as compiled code is reckoned to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

__all__ = ["BUDGETS", "CHARTED", "Curve", "Point", "agreed", "nested", "told"]

# Below a fifth nothing more is saved: inputs of layers have to stay, and what is computed again is there for a while.
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# Those that are reckoned, of which each takes a second or two for 24 layers. Between 0.8 and 0.5 little happens, and
# above 0.8 the line is on the safe side.
CHARTED = (0.2, 0.3, 0.4, 0.5, 0.8, 1.0)


@dataclass(frozen=True)
class Point:
    """Under one budget.

    Attributes:
        budget: share of activations that is saved.
        saved: bytes that forward leaves for backward.
        peak: the most bytes at once, of forward and backward.
    """

    budget: float
    saved: float
    peak: float


@dataclass(frozen=True)
class Curve:
    """Of graphs that are run forward, and then backward in the opposite order.

    Attributes:
        points: at least one, by growing budget.
    """

    points: tuple[Point, ...]

    def at(self, budget: float) -> Point:
        """Between two points, on the line between them; beyond the last one, as there."""
        place = bisect_left([point.budget for point in self.points], budget)
        low, high = self.points[max(place - 1, 0)], self.points[min(place, len(self.points) - 1)]
        if high.budget <= low.budget:
            return replace(low, budget=budget)
        share = min((budget - low.budget) / (high.budget - low.budget), 1.0)
        return Point(budget, low.saved + share * (high.saved - low.saved), low.peak + share * (high.peak - low.peak))

    def more(self, budget: float, before: float) -> float:
        """Bytes at the peak that one budget takes more than another."""
        return self.at(budget).peak - self.at(before).peak

    def without(self, gone: Callable[[float], float]) -> Curve:
        """Where so many bytes, under each budget, lie elsewhere between forward and backward."""

        def less(point: Point) -> Point:
            away = gone(point.budget)
            return replace(point, saved=point.saved - away, peak=point.peak - away)

        return Curve(tuple(map(less, self.points)))


def nested(curves: Sequence[Curve]) -> Curve | None:
    """Of all of them together, in the order in which they run forward: each finds there what those before it saved.
    None where there is none, or one of other budgets than :data:`CHARTED`."""
    if not curves or any(tuple(point.budget for point in curve.points) != CHARTED for curve in curves):
        return None
    points = []
    for under in zip(*(curve.points for curve in curves), strict=True):
        saved = peak = 0.0
        for point in under:
            peak = max(peak, saved + point.peak)
            saved += point.saved
        points.append(Point(under[0].budget, saved, peak))
    return Curve(tuple(points))


def told(curve: Curve | None) -> list[float]:
    """Numbers of a curve that :func:`nested` has made, as many of whichever, that grow with the bytes."""
    if curve is None:
        return [inf] * 2 * len(CHARTED)
    return [value for point in curve.points for value in (point.saved, point.peak)]


def agreed(numbers: Sequence[float]) -> Curve | None:
    """Of the largest of each that anybody told; None where somebody told of none."""
    if inf in numbers:
        return None
    pairs = zip(CHARTED, numbers[::2], numbers[1::2], strict=True)
    return Curve(tuple(Point(*pair) for pair in pairs))
