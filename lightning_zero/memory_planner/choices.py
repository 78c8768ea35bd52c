"""Alternatives for a training's memory with bytes and seconds, and a knapsack over them.

The seconds are estimates that put alternatives in order. :func:`planner_items` gives the items, :func:`pick` takes one
variant of each. Assumptions:

* Recomputation runs the cheapest ops first: ``RECOMPUTED`` was counted in the matrix products of a compiled Llama.
* A transfer costs the part that exceeds the compute it overlaps with, and at least ``MIN_EXPOSED`` of it.
* Staging buffers hide a transfer of optimizer state behind forward and backward. They hide nothing if activations are
  offloaded too, because both use the same link. Master weights cannot be prefetched before backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_zero.config.schema import OFFLOAD_CHOICES
from lightning_zero.memory_planner.inputs import Constraints, MemoryConfig, PlannerInputs, StepTimes

ACTIVATIONS, WEIGHTS, HOST, GRADIENTS = "activations", "whole weights", "on the host", "gradients"

# Candidate shares of activations. Below 0.2 the layers' inputs and the recomputed tensors dominate.
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# (share of activations that is saved, share of a forward that is recomputed)
RECOMPUTED = ((0.0, 1.0), (0.18, 0.85), (0.25, 0.65), (0.5, 0.18), (1.0, 0.0))
FORWARD_SHARE = 1 / 3  # of a pass
MIN_EXPOSED = 0.05  # share of an overlapped transfer that is lost
# Decrease of the peak per byte that is no longer saved. Decoders measured 0.7 to 1.0, a T5 0.8 to 0.94; the peak moves
# to another place, and recomputed tensors take memory.
PEAK_PER_SAVED_BYTE = 0.7
IN_FLIGHT_SHARE = 0.15  # of offloaded activations that are on the device while they are copied
WEIGHT_STEPS = 16  # granularity of kept weights
# Share of a step that deferring the reduction must save: ``param.grad`` holds zeros until then, which users may see.
MIN_REDUCE_ONCE_GAIN = 0.02
MIN_RING_BYTES = 1 << 20


@dataclass(frozen=True)
class Variant:
    """One alternative of an item.

    Attributes:
        nbytes: bytes of the device at the peak.
        seconds: seconds of an optimizer step.
    """

    value: Any
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Item:
    """A setting with alternatives, of which exactly one is taken.

    Attributes:
        by_hand: the user has chosen, so there is only one.
    """

    name: str
    variants: tuple[Variant, ...]
    by_hand: bool = False


@dataclass(frozen=True)
class Pick:
    """One variant of each item, with their sums."""

    chosen: tuple[Variant, ...]
    nbytes: int
    seconds: float


def frontier(items: Sequence[Item]) -> list[Pick]:
    """Return all Pareto-optimal picks by growing bytes."""
    found = [Pick((), 0, 0.0)]
    for item in items:
        found = _pareto(
            Pick((*before.chosen, one), before.nbytes + one.nbytes, before.seconds + one.seconds)
            for before in found
            for one in item.variants
        )
    return found


def pick(items: Sequence[Item], nbytes: float) -> Pick:
    """Return the fastest pick within ``nbytes``, or the smallest pick if none fits."""
    along = frontier(items)
    return next((one for one in reversed(along) if one.nbytes <= nbytes), along[0])


def _pareto(picks: Iterable[Pick]) -> list[Pick]:
    found: list[Pick] = []
    for one in sorted(picks, key=lambda one: (one.nbytes, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def planner_items(inputs: PlannerInputs, free: Constraints) -> list[Item]:
    """Return the four items in the order of :func:`config_from_pick`. A fixed setting has one variant."""
    return [_activations(inputs, free), _weights(inputs, free), _host(inputs, free), _gradients(inputs, free)]


def config_from_pick(values: tuple[Variant, ...], inputs: PlannerInputs) -> MemoryConfig:
    """Return the configuration that a pick of :func:`planner_items` means."""
    (budget, offloaded), weights, (names, ring), once = (variant.value for variant in values)
    offload = tuple(name for name in OFFLOAD_CHOICES if name in {*names, *offloaded})
    until = inputs.current.until if inputs.times.passes < 2 or not weights else "step"
    return MemoryConfig(budget, offload, weights, until, once, ring)


def size_of(chosen: MemoryConfig, inputs: PlannerInputs) -> float:
    """Return the bytes at the peak of everything that can be chosen."""
    budget = chosen.activation_memory_budget
    newly_offloaded = "activations" in chosen.offload and "activations" not in inputs.current.offload
    return (
        _activation_bytes(inputs, budget)
        - (_offloaded_bytes(inputs.activations * budget, inputs.times) if newly_offloaded else 0.0)
        + chosen.weights
        + _optimizer_bytes(chosen.offload, chosen.ring, inputs)
        + inputs.gradients.full * chosen.reduce_once
    )


def host_bytes(values: tuple[Variant, ...], inputs: PlannerInputs) -> float:
    """Return the host memory of a pick, without activations that were on the host before."""
    activations, _, host, _ = values
    budget, offloaded = activations.value
    newly_offloaded = offloaded and "activations" not in inputs.current.offload
    moved = _offloaded_bytes(inputs.activations * budget, inputs.times) if newly_offloaded else 0.0
    return moved + _moved_bytes(host.value[0], inputs)


def with_measured_peak(inputs: PlannerInputs, chosen: MemoryConfig, peak: float) -> PlannerInputs:
    """Return the inputs after ``chosen`` was applied and ``peak`` was measured with it."""
    budget = max(chosen.activation_memory_budget, 0.01)
    updated = replace(inputs, current=chosen, peak=peak)
    if "activations" not in chosen.offload or "activations" in inputs.current.offload:
        return updated
    # From here on ``activations`` counts those that remain on the device.
    gone = _offloaded_bytes(inputs.activations * budget, inputs.times) / budget
    return replace(updated, activations=inputs.activations - gone)


def recomputed_share(budget: float) -> float:
    """Return the share of a forward that is recomputed if ``budget`` of the activations is saved."""
    place = min(max(bisect_right([share for share, _ in RECOMPUTED], budget), 1), len(RECOMPUTED) - 1)
    (share, more), (next_share, less) = RECOMPUTED[place - 1], RECOMPUTED[place]
    return more + (less - more) * (budget - share) / (next_share - share)


def gather_seconds(inputs: PlannerInputs, kept: float) -> float:
    """Return the seconds to gather weights again of which ``kept`` bytes are kept."""
    times, left = inputs.times, max(inputs.weights - kept, 0.0)
    if not inputs.weights:
        return 0.0
    transfer = inputs.weights * times.gather_s
    again = times.passes * _exposed(transfer, times.pass_s * (1 - FORWARD_SHARE))
    if times.passes >= 2:
        again += (times.passes - 1) * _exposed(transfer, times.pass_s * FORWARD_SHARE)
    return again * left / inputs.weights


def contention_seconds(values: tuple[Variant, ...], inputs: PlannerInputs) -> float:
    """Return the seconds that optimizer state waits because activations use the link."""
    activations, _, host, _ = values
    if "activations" not in activations.value[1]:
        return 0.0
    names, ring = host.value
    return _optimizer_seconds(names, ring, replace(inputs, prefetches_state=False)) - host.seconds


def _activations(inputs: PlannerInputs, free: Constraints) -> Item:
    current, times = inputs.current.activation_memory_budget, inputs.times
    # If they are offloaded already, ``inputs.activations`` are those that remain on the device.
    were_offloaded = "activations" in inputs.current.offload
    budgets = sorted({current, *BUDGETS}) if free.activations else [current]
    if free.below is not None:
        budgets = [budget for budget in budgets if budget < free.below] or budgets[:1]
    may_offload = not were_offloaded and free.offload is not None and "activations" in free.offload
    variants = []
    for budget in budgets:
        taken = _activation_bytes(inputs, budget)
        again = recomputed_share(budget) * times.pass_s * FORWARD_SHARE * times.passes
        variants.append(Variant((budget, ("activations",) if were_offloaded else ()), int(taken), again))
        moved = _offloaded_bytes(inputs.activations * budget, times)
        if may_offload and moved <= inputs.host_free:
            lost = 2 * MIN_EXPOSED * moved / times.host_bytes_per_s * times.passes
            variants.append(Variant((budget, ("activations",)), int(taken - moved), again + lost))
    return Item(ACTIVATIONS, tuple(variants), by_hand=not (free.activations or may_offload))


def _weights(inputs: PlannerInputs, free: Constraints) -> Item:
    kept = [inputs.current.weights]
    if free.weights:
        kept = sorted({inputs.weights * part / WEIGHT_STEPS for part in range(WEIGHT_STEPS + 1)})
    variants = tuple(Variant(size, int(size), gather_seconds(inputs, size)) for size in kept)
    return Item(WEIGHTS, variants, by_hand=not free.weights)


def _host(inputs: PlannerInputs, free: Constraints) -> Item:
    current = tuple(name for name in inputs.current.offload if name != "activations")
    alternatives = {current}
    masters_fixed = "parameters" in current and "parameters" not in (free.offload or ())
    if free.offload is not None and not masters_fixed:
        alternatives |= {()}
        if "optimizer" in free.offload and inputs.states <= inputs.host_free:
            alternatives |= {("optimizer",)}
        both = {"optimizer", "parameters"} <= {*free.offload}
        if both and inputs.states + inputs.masters <= inputs.host_free:
            alternatives |= {("optimizer", "parameters")}
    variants = [
        Variant((names, ring), int(_optimizer_bytes(names, ring, inputs)), _optimizer_seconds(names, ring, inputs))
        for names in sorted(alternatives)
        for ring in (
            _ring_sizes(inputs) if free.ring and names == ("optimizer",) else [inputs.current.ring if names else 0]
        )
    ]
    return Item(HOST, tuple(variants), by_hand=free.offload is None)


def _gradients(inputs: PlannerInputs, free: Constraints) -> Item:
    times, current = inputs.times, inputs.current.reduce_once
    transfer = inputs.gradients.reduced * times.gather_s
    again = max(times.passes - 1, 0.0) * _exposed(transfer, times.pass_s * (1 - FORWARD_SHARE))
    worth = again >= MIN_REDUCE_ONCE_GAIN * times.pass_s * times.passes or current
    may = free.gradients and inputs.gradients.full > 0 and worth
    alternatives = sorted({current, *((False, True) if may else ())})
    variants = [Variant(once, int(inputs.gradients.full * once), 0.0 if once else again) for once in alternatives]
    return Item(GRADIENTS, tuple(variants), by_hand=not free.gradients)


def _activation_bytes(inputs: PlannerInputs, budget: float) -> float:
    less = max(inputs.current.activation_memory_budget - budget, 0.0)
    return inputs.activations * (budget + (1 - PEAK_PER_SAVED_BYTE) * less)


def _offloaded_bytes(saved: float, times: StepTimes) -> float:
    """Return the activations that can be copied during forward, without those in flight."""
    overlap_s = min(times.pass_s * FORWARD_SHARE, times.forward_s or float("inf"))
    return min(saved * (1 - IN_FLIGHT_SHARE), overlap_s * times.host_bytes_per_s)


def _exposed(transfer_s: float, compute_s: float) -> float:
    return max(transfer_s - compute_s, MIN_EXPOSED * transfer_s)


def _ring_sizes(inputs: PlannerInputs) -> list[int]:
    """Return candidate sizes of the staging buffers; 0 is the options' size.

    They double, so that two measurements of one training rarely choose different sizes.
    """
    found, ring = [0], 2 * max(inputs.ring, MIN_RING_BYTES)
    useful = inputs.prefetches_state and not inputs.times.guessed
    while useful and ring < min(2 * _hidden_bytes(inputs.times), inputs.states):
        found.append(int(ring))
        ring *= 2
    return found


def _hidden_bytes(times: StepTimes) -> float:
    """Return the bytes that can be copied in each direction during a step's passes."""
    return times.passes * times.pass_s * times.host_bytes_per_s


def _optimizer_bytes(offload: tuple[str, ...], ring: int, inputs: PlannerInputs) -> float:
    states = 0.0 if "optimizer" in offload else inputs.states
    masters = 0.0 if "parameters" in offload else inputs.masters
    staged = {"optimizer", "parameters"} & {*offload}
    return states + masters + (min(ring or inputs.ring, inputs.states + inputs.masters) if staged else 0.0)


def _moved_bytes(offload: tuple[str, ...], inputs: PlannerInputs) -> float:
    return inputs.states * ("optimizer" in offload) + inputs.masters * ("parameters" in offload)


def _optimizer_seconds(offload: tuple[str, ...], ring: int, inputs: PlannerInputs) -> float:
    moved, link = _moved_bytes(offload, inputs), inputs.times.host_bytes_per_s
    prefetched = inputs.prefetches_state and "parameters" not in offload
    hidden = min(ring or inputs.ring, moved, _hidden_bytes(inputs.times)) if prefetched else 0.0
    return _exposed(moved / link, hidden / link)
