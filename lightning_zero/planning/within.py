"""``lightning_zero.plan(..., memory=...)``: what would be chosen, by the same planner that trainings use, from numbers
on paper in place of measured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_zero.budget.facts import MemoryConfig, PlannerInputs, StepTimes
from lightning_zero.budget.options import apply_memory_config, memory_config, constraints_of
from lightning_zero.budget.plan import choose_plan
from lightning_zero.compile.known import EngineMemoryFacts
from lightning_zero.config import EngineConfig
from lightning_zero.planning.result import TrainingPlan
from lightning_zero.planning.training import StepEstimate
from lightning_zero.profiling.headroom import memory_limit

__all__ = ["with_first_step_peak", "plan_within_limit"]

# A choice is estimated once it is made, and what the estimate then says may ask for another one.
TRIES = 6


def plan_within_limit(
    config: EngineConfig, estimate: Callable[[EngineConfig], TrainingPlan], known: EngineMemoryFacts, passes: int
) -> TrainingPlan:
    """What training with ``config.memory`` comes to.

    Args:
        estimate: of options without a budget.
        known: of the training.
        passes: in a step of the optimizer.
    """
    now, free = memory_config(config), constraints_of(config, known.may_leave)
    plain = replace(config, memory=None)
    estimates: dict[MemoryConfig, TrainingPlan] = {}
    refused: dict[tuple[tuple[str, ...], int, bool], float] = {}  # shares of activations, by what goes to the host

    def estimated(now: MemoryConfig) -> TrainingPlan:
        if now not in estimates:
            estimates[now] = estimate(apply_memory_config(plain, now))
        return estimates[now]

    for _ in range(TRIES):
        found = estimated(now)
        facts = _facts(found, config, known, passes, now)
        if facts.peak > facts.limit:
            share, place = now.activation_memory_budget, (now.offload, now.ring, now.over_copies)
            refused[place] = min(share, refused.get(place, share))
        chosen = choose_plan(facts, free)
        # A smaller share may have so much room to spare that the one before it seems to fit.
        below = refused.get((chosen.chosen.offload, chosen.chosen.ring, chosen.chosen.over_copies))
        if below is not None and chosen.chosen.activation_memory_budget >= below:
            chosen = choose_plan(facts, replace(free, below=below))
        if _same(chosen.chosen, now):
            break
        now = replace(chosen.chosen, weights=0.0, reduce_once=False)
    else:  # it is what was chosen last, and says of itself what it takes
        found = estimated(now)
        peak = _facts(found, config, known, passes, now).peak
        chosen = replace(chosen, peak=int(peak + _besides(chosen.chosen, known)))
    kept = int(chosen.chosen.weights)
    roles = found.roles | {"resident_weight": found.roles.get("resident_weight", 0) + kept}
    if chosen.chosen.reduce_once:
        roles["deferred_gradient"] = roles.get("deferred_gradient", 0) + int(known.gradients.whole)
    return replace(found, roles=roles, memory=replace(chosen, source="estimated"))


def _besides(chosen: MemoryConfig, known: EngineMemoryFacts) -> float:
    """Bytes of what was chosen that no estimate of options has."""
    return chosen.weights + known.gradients.whole * chosen.reduce_once


def with_first_step_peak(found: TrainingPlan, held: Callable[[], StepEstimate | None], over: float = 0.0) -> TrainingPlan:
    """What becomes of the first step, which runs eagerly, before optimizers have made state: as much of what it saves
    as has to is on the host until its backward, within a limit or where the device would be full.

    Args:
        held: gives an eager pass with all of that on the host; None where it could not be traced.
        over: bytes of gradients that may lie over copies of weights: they do so from the beginning only where that
            has shown by itself that not all would fit.
    """
    plan, eager = found.memory, found.passes.eager
    if eager is None:
        return found
    context = found.device.context
    limit = memory_limit(None, found.device.memory) if plan is None else plan.limit
    later = plan is not None and plan.chosen.over_copies and context + found.stays + over <= limit
    besides = over * later
    most = context + found.first_peak_with(eager, besides)
    if most > limit and (least := held()) is not None:
        most = max(context + found.first_peak_with(least, besides), limit)
    memory = None if plan is None else replace(plan, first_step=int(most))
    return replace(found, first_peak=int(most - context), memory=memory)


def _same(chosen: MemoryConfig, now: MemoryConfig) -> bool:
    """But for weights, of which what is kept follows from the rest."""
    return (chosen.activation_memory_budget, chosen.offload, chosen.ring, chosen.over_copies) == (
        now.activation_memory_budget,
        now.offload,
        now.ring,
        now.over_copies,
    )


def _facts(found: TrainingPlan, config: EngineConfig, known: EngineMemoryFacts, passes: int, now: MemoryConfig) -> PlannerInputs:
    step = found.passes.compiled or found.passes.eager
    facts = known.facts(
        "estimated", memory_limit(config.memory, found.device.memory), found.peak + found.device.context, now
    )
    if step is None:
        return facts
    pass_s = step.forward_s + step.backward_s
    speed: StepTimes = replace(facts.speed, pass_s=pass_s, passes=float(passes), pass_known="estimated")
    saved = step.saved / max(now.activation_memory_budget, 0.01)
    return replace(facts, activations=saved, weights=known.whole, speed=speed)
