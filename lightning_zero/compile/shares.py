"""How a budget of whole weights is shared out among compiled graphs.

A budget of weights is for one pass forward and backward, in which graphs may run several times (layers that look alike
share one), and how often is not known when they are compiled. So it is handed to graphs as the share of their own
weights that they keep: the budget over the bytes that a pass gathers twice, of which half the bytes that it gathers are
an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_zero.compile.graph_plan import Gather, GraphPlan

__all__ = ["another_fits", "saved_share"]


def saved_share(budget: float, traffic: float) -> float:
    """The share of the weights that it gathers twice that each graph may keep, where a pass forward and backward
    gathers ``traffic`` bytes."""
    return min(2 * budget / traffic, 1.0) if traffic > 0 else 0.0


def another_fits(plans: Iterable[GraphPlan], share: float, budget: float, small_bytes: int) -> bool:
    """Whether a weight would stay that does not stay now: within a share of what each backward gathers, or within a
    budget of bytes until the optimizer steps, for which small weights do not count.

    Plans know the bytes of groups; the smallest weight of a group is at most as large as their mean.
    """
    for plan in plans:
        room = share * sum(gather.bytes for gather in plan.gathers) if plan.kind == "backward" else 0.0
        for mean in map(_mean_bytes, plan.gathers):
            if mean <= room or small_bytes < mean <= budget:
                return True
    return False


def _mean_bytes(gather: Gather) -> float:
    return gather.bytes / len(gather.weights)
