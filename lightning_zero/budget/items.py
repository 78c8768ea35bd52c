"""What could be done about a training's memory: each thing in several ways, with bytes at the peak and seconds lost.

Seconds are estimates that serve to compare, as those of :mod:`lightning_zero.profiling.cost` do:

* What is computed again is the cheapest first, so the first bytes cost little. How much of a forward that comes to for
  a share of the activations (``RECOMPUTED``) was counted in matrix products of a compiled Llama; see the README.
* Weights that are gathered again wait for their transfer as far as it takes longer than the computing beside it.
* Gradients of micro-batches that each reduces wait likewise; those that stay whole until the last one's do not.
* What lies on the host is copied there and back. Of activations as many leave as are copied beside forward, and come
  beside backward. An optimizer's state, and master weights with it, come and go while it steps, in both directions at
  once. What the device's buffers hold of state goes both ways beside forward and backward, as far as these last;
  nothing hides the rest, and nothing of it where activations go the same way: they wait behind it (6.7 billion weights,
  8 GiB of buffers: 1155 ms without activations, 1319 with them, 1316 with 256 MiB). Masters do not come before
  backward, and have left before the next forward.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from lightning_zero.budget.curve import BUDGETS
from lightning_zero.budget.facts import Constraints, MemoryConfig, PlannerInputs, StepTimes
from lightning_zero.budget.knapsack import Item, Variant
from lightning_zero.config.schema import OFFLOAD_CHOICES

__all__ = [
    "ACTIVATIONS",
    "GRADIENTS",
    "HOST",
    "WEIGHTS",
    "with_measured_peak",
    "config_from_pick",
    "contention_seconds",
    "gather_seconds",
    "host_bytes",
    "planner_items",
    "recomputed_share",
    "size_of",
]

ACTIVATIONS, WEIGHTS, HOST, GRADIENTS = "activations", "whole weights", "on the host", "gradients"

# (share of activations that is saved, share of a forward that is computed again)
RECOMPUTED = ((0.0, 1.0), (0.18, 0.85), (0.25, 0.65), (0.5, 0.18), (1.0, 0.0))
FORWARD = 1 / 3  # of a pass
BESIDE = 0.05  # of a transfer is lost although something is computed beside it
# Of activations that are not saved any more, where no curve says it: what is computed again takes memory meanwhile, and
# the peak comes to lie elsewhere. A decoder's peak falls by 0.7 to 1.0 of them, a T5's by 0.8 to 0.94 (to 0.3 of them
# saved).
LESS = 0.7
STAYS = 0.15  # of activations that go to the host: those that are on their way
PARTS = 16  # in which weights are counted
# Of a step: what reducing once has to save. Until then ``param.grad`` holds zeros, and nobody should see that for less.
WORTH = 0.02
LEAST_RING = 1 << 20  # of buffers that a plan chooses, however few the options say


def planner_items(facts: PlannerInputs, free: Constraints) -> list[Item]:
    """In the order that :func:`config_from_pick` takes them apart in. What is not free has the one variant that there is
    now."""
    return [_activations(facts, free), _weights(facts, free), _host(facts, free), _gradients(facts, free)]


def config_from_pick(values: tuple[Variant, ...], facts: PlannerInputs) -> MemoryConfig:
    """What a pick of these items comes to."""
    (budget, away), weights, host, once = (variant.value for variant in values)
    way, ring = host
    offload = tuple(name for name in OFFLOAD_CHOICES if name in {*way, *away})
    until = facts.now.until if facts.speed.passes < 2 or not weights else "step"
    return MemoryConfig(budget, offload, weights, until, once, ring)


def size_of(chosen: MemoryConfig, facts: PlannerInputs) -> float:
    """Bytes at the peak, of all that there is a choice about."""
    budget = chosen.activation_memory_budget
    leave = "activations" in chosen.offload and "activations" not in facts.now.offload
    return (
        _at_peak(facts, budget)
        - (_leaving(facts.activations * budget, facts.speed) if leave else 0.0)
        + chosen.weights
        + _optimizer_bytes(chosen.offload, chosen.ring, facts)
        + facts.gradients.whole * chosen.reduce_once
    )


def host_bytes(values: tuple[Variant, ...], facts: PlannerInputs) -> float:
    """Of the host's memory, that a pick of these items takes beside what activations took there before."""
    activations, _, host, _ = values
    (budget, away), now = activations.value, facts.now.offload
    moved = _leaving(facts.activations * budget, facts.speed) if away and "activations" not in now else 0.0
    return moved + _moved(host.value[0], facts)


def with_measured_peak(facts: PlannerInputs, chosen: MemoryConfig, peak: float) -> PlannerInputs:
    """What is known once ``chosen`` holds in place of ``facts.now``, and the peak was measured: of activations that
    leave, those that stay."""
    budget = max(chosen.activation_memory_budget, 0.01)
    facts, before = replace(facts, now=chosen, peak=peak), facts
    if "activations" not in chosen.offload or "activations" in before.now.offload:
        return facts
    gone = _leaving(facts.activations * budget, facts.speed) / budget
    curve = facts.curve and facts.curve.without(lambda share: _leaving(before.activations * share, before.speed))
    return replace(facts, activations=facts.activations - gone, curve=curve)


def _at_peak(facts: PlannerInputs, budget: float) -> float:
    """Bytes that activations take there, where so large a share of them is saved."""
    now = facts.now.activation_memory_budget
    if facts.curve is not None:
        return facts.activations * now + facts.curve.more(budget, now)
    less = max(now - budget, 0.0)
    return facts.activations * (budget + (1 - LESS) * less)


def recomputed_share(budget: float) -> float:
    """How much of a forward is computed again where so much of the activations is saved."""
    place = min(max(bisect_right([share for share, _ in RECOMPUTED], budget), 1), len(RECOMPUTED) - 1)
    (share, more), (next_share, less) = RECOMPUTED[place - 1], RECOMPUTED[place]
    return more + (less - more) * (budget - share) / (next_share - share)


def _activations(facts: PlannerInputs, free: Constraints) -> Item:
    now = facts.now.activation_memory_budget
    was_away = "activations" in facts.now.offload  # then those that are known are those that stay on the device
    budgets = sorted({now, *BUDGETS}) if free.activations else [now]
    if free.below is not None:
        budgets = [budget for budget in budgets if budget < free.below] or budgets[:1]
    may_leave = not was_away and free.offload is not None and "activations" in free.offload
    variants = []
    for budget in budgets:
        saved, taken = facts.activations * budget, _at_peak(facts, budget)
        again = recomputed_share(budget) * facts.speed.pass_s * FORWARD * facts.speed.passes
        gone = ("activations",) if was_away else ()
        variants.append(Variant((budget, gone), int(taken), again))
        moved = _leaving(saved, facts.speed)
        if may_leave and moved <= facts.host:
            lost = 2 * BESIDE * moved / facts.speed.host_bytes_per_s * facts.speed.passes
            variants.append(Variant((budget, ("activations",)), int(taken - moved), again + lost))
    return Item(ACTIVATIONS, tuple(variants), by_hand=not (free.activations or may_leave))


def _leaving(saved: float, speed: StepTimes) -> float:
    """Bytes of activations that leave: what can be copied while forward computes, but for those on their way."""
    beside = min(speed.pass_s * FORWARD, speed.forward_s or float("inf"))
    return min(saved * (1 - STAYS), beside * speed.host_bytes_per_s)


def exposed(transfer: float, beside: float) -> float:
    """Seconds that are lost of a transfer beside which so much is computed."""
    return max(transfer - beside, BESIDE * transfer)


def _weights(facts: PlannerInputs, free: Constraints) -> Item:
    kept = [facts.now.weights]
    if free.weights:
        kept = sorted({facts.weights * part / PARTS for part in range(PARTS + 1)})
    return Item(
        WEIGHTS,
        tuple(Variant(size, int(size), gather_seconds(facts, size)) for size in kept),
        by_hand=not free.weights,
    )


def gather_seconds(facts: PlannerInputs, kept: float) -> float:
    """Lost by what does not stay: in each backward, and, where several passes share a step, in the later forwards."""
    speed, left = facts.speed, max(facts.weights - kept, 0.0)
    if not facts.weights:
        return 0.0
    whole, share = facts.weights * speed.gather_s, left / facts.weights
    again = speed.passes * exposed(whole, speed.pass_s * (1 - FORWARD))
    if speed.passes >= 2:
        again += (speed.passes - 1) * exposed(whole, speed.pass_s * FORWARD)
    return again * share


def _host(facts: PlannerInputs, free: Constraints) -> Item:
    now = tuple(name for name in facts.now.offload if name != "activations")
    ways = {now}
    stay = "parameters" in now and "parameters" not in (free.offload or ())  # masters cannot move any more
    if free.offload is not None and not stay:
        ways |= {()}
        if "optimizer" in free.offload and facts.states <= facts.host:
            ways |= {("optimizer",)}
        if {"optimizer", "parameters"} <= {*free.offload} and facts.states + facts.masters <= facts.host:
            ways |= {("optimizer", "parameters")}
    variants = [
        Variant((way, ring), int(_optimizer_bytes(way, ring, facts)), _optimizer_seconds(way, ring, facts))
        for way in sorted(ways)
        for ring in (_rings(facts) if free.ring and way == ("optimizer",) else [facts.now.ring if way else 0])
    ]
    return Item(HOST, tuple(variants), by_hand=free.offload is None)


def _rings(facts: PlannerInputs) -> list[int]:
    """Bytes of buffers, of which 0 are as many as the options say, to all that is of use: twice as much each time, so
    that two measurements of the same training seldom find two of them."""
    found, ring = [0], 2 * max(facts.ring, LEAST_RING)
    of_use = facts.ahead and not facts.speed.guessed
    while of_use and ring < min(2 * _beside_passes(facts.speed), facts.states):
        found.append(int(ring))
        ring *= 2
    return found


def _beside_passes(speed: StepTimes) -> float:
    """Bytes that are copied, each way, beside a step's passes."""
    return speed.passes * speed.pass_s * speed.host_bytes_per_s


def _optimizer_bytes(offload: tuple[str, ...], ring: int, facts: PlannerInputs) -> float:
    states = 0.0 if "optimizer" in offload else facts.states
    masters = 0.0 if "parameters" in offload else facts.masters
    away = {"optimizer", "parameters"} & {*offload}
    return states + masters + (min(ring or facts.ring, facts.states + facts.masters) if away else 0.0)


def _moved(offload: tuple[str, ...], facts: PlannerInputs) -> float:
    return facts.states * ("optimizer" in offload) + facts.masters * ("parameters" in offload)


def _ahead(offload: tuple[str, ...], ring: int, facts: PlannerInputs) -> float:
    """Bytes that come, and leave, beside passes, if these last long enough."""
    goes = facts.ahead and "parameters" not in offload
    return min(ring or facts.ring, _moved(offload, facts)) if goes else 0.0


def _optimizer_seconds(offload: tuple[str, ...], ring: int, facts: PlannerInputs) -> float:
    hidden = min(_ahead(offload, ring, facts), _beside_passes(facts.speed))
    link = facts.speed.host_bytes_per_s
    return exposed(_moved(offload, facts) / link, hidden / link)


def contention_seconds(values: tuple[Variant, ...], facts: PlannerInputs) -> float:
    """Seconds that a pick of these items takes in addition to those of each: what activations leave nothing to hide."""
    activations, _, host, _ = values
    if "activations" not in activations.value[1]:
        return 0.0
    way, ring = host.value
    return _optimizer_seconds(way, ring, replace(facts, ahead=False)) - host.seconds


def _gradients(facts: PlannerInputs, free: Constraints) -> Item:
    """Of micro-batches but the last one: each reduces its own, beside its backward, or all go with the last."""
    speed, now = facts.speed, facts.now.reduce_once
    again = max(speed.passes - 1, 0.0) * exposed(facts.gradients.wire * speed.gather_s, speed.pass_s * (1 - FORWARD))
    may = free.gradients and facts.gradients.whole > 0 and (again >= WORTH * speed.pass_s * speed.passes or now)
    ways = sorted({now, *((False, True) if may else ())})
    variants = [Variant(once, int(facts.gradients.whole * once), 0.0 if once else again) for once in ways]
    return Item(GRADIENTS, tuple(variants), by_hand=not free.gradients)
