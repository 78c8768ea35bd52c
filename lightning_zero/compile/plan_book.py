"""The plans of graphs that have run: all of them, and those that graphs compiled from now on must follow."""

from __future__ import annotations

from collections.abc import Hashable

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

    def forward_seconds(self) -> float:
        """Return the estimated compute seconds of the forward graphs under the current key; 0 if unknown."""
        return sum(plan.compute_s for plan in self.agreed_plans if plan.kind == "forward")

    def keeps_more(self, share: float, budget: float, small_bytes: int) -> bool:
        """Return True if a weight would be kept that is gathered again now.

        Plans know the bytes of groups; the smallest weight of a group is at most as large as their mean.

        Args:
            share: of the bytes that each backward gathers.
            budget: bytes of weights that are kept until the optimizer steps.
            small_bytes: size up to which weights do not count in ``budget``.
        """
        for plan in self.agreed_plans:
            room = share * sum(gather.bytes for gather in plan.gathers) if plan.kind == "backward" else 0.0
            for gather in plan.gathers:
                mean = gather.bytes / len(gather.weights)
                if mean <= room or small_bytes < mean <= budget:
                    return True
        return False

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
