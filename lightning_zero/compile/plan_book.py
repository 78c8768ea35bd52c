"""The plans of graphs that have run: all of them, and those that graphs compiled from now on must follow."""

from __future__ import annotations

from collections.abc import Hashable

from lightning_zero.budget.curve import Point
from lightning_zero.compile.plan import GraphPlan, Plan

__all__ = ["PlanStore"]


class PlanStore:
    """Of one engine, the same on every rank: a graph's plan is entered once the ranks have agreed on it."""

    def __init__(self) -> None:
        self._all: list[GraphPlan] = []
        self._agreed: dict[Hashable, list[GraphPlan]] = {}
        self._key: Hashable = None

    @property
    def count(self) -> int:
        """How many graphs have run."""
        return len(self._all)

    @property
    def plan(self) -> Plan:
        """Of all graphs that have run."""
        return Plan(tuple(self._all))

    @property
    def agreed_plans(self) -> tuple[GraphPlan, ...]:
        """Of the graphs that have run since :meth:`forget` under the current key; later ones follow them."""
        return tuple(self._agreed.get(self._key, ()))

    @property
    def charts(self) -> list[tuple[Point, ...]]:
        """What graphs that run under the current key say of other budgets of activations. Where these were announced
        before, as those of an earlier training are, nobody hears of them again, and what was said then holds."""
        now = [plan.chart for plan in self.agreed_plans if plan.chart]
        return now or [plan.chart for plan in self._all if plan.chart]

    def select(self, key: Hashable) -> None:
        """Graphs are now rewritten as ``key`` says, and follow plans of the same key: other passes, or another share of
        weights that is kept, make other groups of the same weights."""
        self._key = key

    def add(self, plan: GraphPlan) -> None:
        """A graph has run, on every rank."""
        self._all.append(plan)
        self._agreed.setdefault(self._key, []).append(plan)

    def forget(self) -> None:
        """Options are others: no graph from now on need follow one before."""
        self._agreed.clear()
