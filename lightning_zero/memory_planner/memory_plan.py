"""A memory plan: the fastest configuration within a limit, its costs, and advice if nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lightning_zero.config.options import Tuning
from lightning_zero.config.text import format_bytes, format_table
from lightning_zero.memory_planner.choices import (
    ACTIVATIONS,
    GRADIENTS,
    HOST,
    WEIGHTS,
    Item,
    Pick,
    Variant,
    config_from_pick,
    contention_seconds,
    gather_seconds,
    host_bytes,
    pick,
    planner_items,
    size_of,
)
from lightning_zero.memory_planner.inputs import Constraints, MemoryConfig, PlannerInputs

OPTIONS = {
    ACTIVATIONS: "activation_memory_budget",
    WEIGHTS: "reshard_after_forward",
    HOST: "offload",
    GRADIENTS: "stage",
}
LABELS = {WEIGHTS: "unsharded weights", HOST: "offloaded to the host"}  # where a row's name is not enough
ALIASED = "over copies of weights, in bfloat16"


@dataclass(frozen=True)
class Line:
    """One row of a plan. The field names are keys in plan files.

    Attributes:
        nbytes: bytes of the device at the peak.
        saved: bytes saved compared to the fastest variant.
        seconds: seconds of a step lost compared to the fastest variant.
    """

    what: str
    choice: str
    nbytes: int
    saved: int
    seconds: float
    by_hand: bool


@dataclass(frozen=True)
class MemoryPlan:
    """A chosen memory configuration; prints as a table. The field names are keys in plan files.

    Attributes:
        source: origin of the numbers, for the user.
        limit: bytes that the device's peak must not exceed.
        peak: expected bytes at the peak.
        measured: peak measured later; None until then.
        first_step: peak of the eager first step; None if unknown.
        seconds_known: origin of the seconds in ``lines``.
        before: value of ``offload`` that would have fit if it had been set before sharding; empty if none would.
    """

    source: str
    limit: int
    peak: int
    chosen: MemoryConfig
    lines: tuple[Line, ...] = ()
    measured: int | None = None
    first_step: int | None = None
    seconds_known: str = ""
    before: tuple[str, ...] = ()

    @property
    def steady(self) -> int:
        """Return the peak of later steps: measured if possible, else expected."""
        return self.peak if self.measured is None else self.measured

    @property
    def missing(self) -> int:
        """Return the bytes by which the limit is exceeded, or was in the first step."""
        return max(self.steady - self.limit, (self.first_step or 0) - self.limit, 0)

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def seconds(self) -> float:
        """Return the seconds of a step lost compared to the fastest configuration."""
        return sum(line.seconds for line in self.lines)

    def options(self) -> dict[str, Any]:
        """Return strategy arguments that choose the same by hand, without those at their defaults."""
        found: dict[str, Any] = {}
        if self.chosen.activation_memory_budget != 1.0:
            found["activation_memory_budget"] = self.chosen.activation_memory_budget
        if self.chosen.offload:
            found["offload"] = self.chosen.offload
        tuning: dict[str, Any] = {}
        if self.chosen.ring:
            tuning["offload_buffer_mb"] = self.chosen.ring / 2**20
        if self.chosen.grad_aliasing:
            tuning["grad_aliasing"] = True
        return found | ({"tuning": Tuning(**tuning)} if tuning else {})

    def advice(self) -> str:
        """Return what the user can do if the limit cannot be held."""
        free = "" if all(line.by_hand for line in self.lines) else "All options for plans are at their smallest. "
        by_hand = [OPTIONS[line.what] for line in self.lines if line.by_hand]
        if self.before:
            when = ", and has to be passed before the model is sharded" if "parameters" in self.before else ""
            free += f"offload={self.before!r} is estimated to fit{when}. "
        leave = f"leave {' and '.join(by_hand)} at the default for plans to choose, " if by_hand else ""
        return (
            f"{free}To go on, {leave}take fewer samples in a batch (and accumulate_grad_batches), write "
            "torch.utils.checkpoint into the module, or shard over more GPUs. What other processes take on the device "
            "counts, too."
        )

    def with_advice(self) -> str:
        """Return the table, with advice if the limit cannot be held."""
        return str(self) if self.fits else f"{self}\n{self.advice()}"

    def as_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold."""
        return asdict(self) | {"missing": self.missing, "fits": self.fits}

    def summary(self) -> str:
        """Return sentences about the peaks and the limit."""
        word = "expected" if self.measured is None else "measured"
        peak, limit = format_bytes(self.steady), format_bytes(self.limit)
        lines = [f"The {word} peak of a step is {peak}, and the limit is {limit}."]
        if self.first_step is not None:
            lines.append(f"The first step, which runs eagerly, has a peak of {format_bytes(self.first_step)}.")
        if not self.fits:
            lines.append(f"The limit is exceeded by {format_bytes(self.missing)}.")
        return " ".join(lines)

    def __str__(self) -> str:
        heads = "", "choice", "memory", "saved", "time lost"
        rows = []
        for line in self.lines:
            lost = f"{line.seconds * 1e3:.1f} ms"
            sizes = format_bytes(line.nbytes), format_bytes(line.saved)
            rows.append((LABELS.get(line.what, line.what), line.choice, *sizes, lost))
        table = [f"Memory plan, {self.source}. {self.summary()}", *format_table(heads, rows)]
        return "\n".join([*table, *([f"  seconds: {self.seconds_known}"] if self.seconds_known else [])])


def choose_plan(inputs: PlannerInputs, free: Constraints, later: Sequence[str] = ()) -> MemoryPlan:
    """Return the fastest plan within the limit, or the smallest plan if none fits.

    Memory that remains is spent on kept weights. Gradients that alias compute copies are rounded to bfloat16 but cost
    no time, so they come first, and only if not everything fits. A smaller limit never gets a larger plan.

    Args:
        later: names of items that are decided later; they stay as they are.
    """
    free = replace(
        free, activations=free.activations and ACTIVATIONS not in later, weights=free.weights and WEIGHTS not in later
    )
    aliased, items = inputs.current.grad_aliasing, planner_items(inputs, free)
    # Only masters on the device have compute copies that gradients can alias.
    on_device = any(_masters_on_device(item).variants for item in items if item.name == HOST)
    if not (free.grad_aliasing and inputs.gradients.aliasable and on_device):
        return _choose(inputs, free, later, aliased)
    if _fastest_fits(items, inputs.limit - _base_bytes(inputs, False)):
        return _choose(inputs, free, later, False)
    plans = [_choose(inputs, free, later, over) for over in ((True, False) if aliased else (False, True))]
    return min(plans, key=lambda plan: (0, plan.seconds) if plan.fits else (1, plan.peak))


def with_offload_advice(
    plan: MemoryPlan, inputs: PlannerInputs, free: Constraints, before: Sequence[str], later: Sequence[str] = ()
) -> MemoryPlan:
    """Return the plan; if it does not fit, with an ``offload`` that would have fit.

    Args:
        before: names that could have moved to the host before the model was sharded.
    """
    if plan.fits or not before or free.offload is None:
        return plan
    instead = choose_plan(inputs, replace(free, offload=(*free.offload, *before)), later)
    return replace(plan, before=instead.chosen.offload if instead.fits else ())


def _base_bytes(inputs: PlannerInputs, aliased: bool) -> float:
    """Return the bytes at the peak that no item is about."""
    fixed = inputs.peak - size_of(inputs.current, inputs)
    return fixed + inputs.gradients.aliasable * (inputs.current.grad_aliasing - aliased)


def _masters_on_device(host: Item) -> Item:
    return replace(host, variants=tuple(one for one in host.variants if "parameters" not in one.value[0]))


def _fastest_fits(items: Sequence[Item], free_bytes: float) -> bool:
    """Return True if every item fits in its fastest variant, apart from those that only use spare memory."""
    spare = WEIGHTS, GRADIENTS
    least = sum(min(one.nbytes for one in item.variants) for item in items if item.name in spare)
    fastest = [min(i.variants, key=lambda one: (one.seconds, one.nbytes)) for i in items if i.name not in spare]
    return least + sum(one.nbytes for one in fastest) <= free_bytes


def _choose(inputs: PlannerInputs, free: Constraints, later: Sequence[str], aliased: bool) -> MemoryPlan:
    items, base = planner_items(inputs, free), _base_bytes(inputs, aliased)
    if aliased:
        items = [_masters_on_device(item) if item.name == HOST else item for item in items]
    found = _pick_with_contention(items, inputs, inputs.limit - base)
    if free.weights:
        found = _fill_with_weights(found, inputs, items, inputs.limit - base)
    chosen = replace(config_from_pick(found.chosen, inputs), grad_aliasing=aliased)
    shown = [pair for pair in zip(items, found.chosen, strict=True) if pair[0].name not in later]
    lines = tuple(_line(*pair) for pair in shown if pair[0].name != GRADIENTS or len(pair[0].variants) > 1)
    if aliased and inputs.gradients.aliasable:
        lines = (Line(GRADIENTS, ALIASED, 0, int(inputs.gradients.aliasable), 0.0, by_hand=False), *lines)
    peak = int(base + found.nbytes)
    return MemoryPlan(inputs.source, int(inputs.limit), peak, chosen, lines, seconds_known=str(inputs.times))


def _pick_with_contention(items: Sequence[Item], inputs: PlannerInputs, free_bytes: float) -> Pick:
    """Return the best pick, counting what offloaded items cost each other in host memory and bandwidth."""
    found = pick(items, free_bytes)
    if host_bytes(found.chosen, inputs) <= inputs.host_free and not contention_seconds(found.chosen, inputs):
        return found
    activations, weights, host, gradients = items
    picks = []
    for state, offloads in product(host.variants, (False, True)):

        def fits(one: Variant, state: Variant = state, offloads: bool = offloads) -> bool:
            if offloads != ("activations" in one.value[1]):
                return False
            if not offloads or "activations" in inputs.current.offload:
                return True
            return host_bytes((one, weights.variants[0], state, gradients.variants[0]), inputs) <= inputs.host_free

        some = replace(activations, variants=tuple(filter(fits, activations.variants)))
        if some.variants:
            lost = contention_seconds((some.variants[0], weights.variants[0], state, gradients.variants[0]), inputs)
            slower = replace(host, variants=(replace(state, seconds=state.seconds + lost),))
            picks.append(pick([some, weights, slower, gradients], free_bytes))
    fitting = [one for one in picks if one.nbytes <= free_bytes]
    return min(fitting, key=lambda one: (one.seconds, one.nbytes)) if fitting else min(picks, key=lambda o: o.nbytes)


def _fill_with_weights(found: Pick, inputs: PlannerInputs, items: Sequence[Item], free_bytes: float) -> Pick:
    place = next(number for number, item in enumerate(items) if item.name == WEIGHTS)
    before = found.chosen[place]
    size = int(min(max(free_bytes - found.nbytes, 0.0) + before.nbytes, inputs.weights))
    if size <= before.nbytes:
        return found
    kept = Variant(size, size, gather_seconds(inputs, size))
    chosen = (*found.chosen[:place], kept, *found.chosen[place + 1 :])
    return Pick(chosen, found.nbytes - before.nbytes + size, found.seconds - before.seconds + kept.seconds)


def _line(item: Item, chosen: Variant) -> Line:
    fastest = min(item.variants, key=lambda one: (one.seconds, one.nbytes))
    return Line(
        item.name,
        _words(item.name, chosen, item.by_hand),
        chosen.nbytes,
        fastest.nbytes - chosen.nbytes,
        max(chosen.seconds - fastest.seconds, 0.0),
        item.by_hand,
    )


def _words(name: str, chosen: Variant, by_hand: bool) -> str:
    mark, buffers = " (by hand)" * by_hand, ""
    if name == ACTIVATIONS:
        budget, offloaded = chosen.value
        kept = "all saved" if budget == 1.0 else f"activation_memory_budget={budget:g}"
        words = f"{kept}, on the host" if offloaded else kept
    elif name == WEIGHTS:
        words = f"{format_bytes(chosen.nbytes)} stay" if chosen.nbytes else "gathered again"
    elif name == GRADIENTS:
        words = "stay whole, reduced once a step" if chosen.value else "reduced in each pass"
    else:
        titles, (names, ring) = {"optimizer": "optimizer state", "parameters": "master weights"}, chosen.value
        words = " and ".join(titles[one] for one in names) or "nothing"
        buffers = f", {format_bytes(ring)} of buffers" if ring else ""  # always the plan's choice
    return words + mark + buffers
