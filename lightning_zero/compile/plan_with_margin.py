"""A plan by what was measured, whose numbers are of another way to spend memory than the one that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_zero.budget.facts import PlannerInputs, Constraints
from lightning_zero.budget.plan import MemoryPlan, with_offload_advice, choose_plan
from lightning_zero.compile.known import EAGER_SAVED

__all__ = ["cautious", "unless_it_may_fit"]

# Of activations that are saved in addition, so much more is left free: one H200's peak grew by 1.4 GiB for 0.8 of them.
DOUBT = 0.75
# Of a limit, so much is left free by whatever has not been measured: the peak of a plan was 0.8 % more than expected.
CAUTION = 0.01
# Of what an eager pass takes, compiled ones seldom take less than that.
COMPILED = 0.5


def cautious(facts: PlannerInputs, free: Constraints, before: Sequence[str], later: Sequence[str] = ()) -> MemoryPlan:
    """What to choose, with some of the limit left free unless everything stays as it is.

    Args:
        before: what could have gone to the host, had that been said before the model was sharded.
        later: as for :func:`~lightning_zero.budget.plan.choose_plan`.
    """
    plan = choose_plan(facts, free, later)
    if plan.chosen != facts.now:  # it must be held at once, not only once it has been measured, too
        more = max(plan.chosen.activation_memory_budget - facts.now.activation_memory_budget, 0.0)
        limit = (1 - CAUTION) * facts.limit - DOUBT * more * facts.activations
        # What fits trains with the gradients that it has: room that is left free is no reason to round them.
        rounded = plan.chosen.over_copies or facts.now.over_copies
        careful = replace(free, over_copies=free.over_copies and rounded)
        plan = replace(choose_plan(replace(facts, limit=limit), careful, later), limit=plan.limit)
    return with_offload_advice(plan, facts, free, before, later)


def unless_it_may_fit(free: Constraints, facts: PlannerInputs) -> Constraints:
    """What may be chosen after a first step, which ran eagerly. Compiled steps may take less, and the gradients of what
    fits are not to be rounded: it is measured first, and does with other means until then."""
    least = facts.peak - (1 - COMPILED) * facts.activations / EAGER_SAVED
    return replace(free, over_copies=free.over_copies and least > facts.limit)
