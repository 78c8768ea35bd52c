"""A memory plan: what is chosen within a limit, what it costs, and what to do where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lightning_zero.budget.facts import Constraints, MemoryConfig, PlannerInputs
from lightning_zero.budget.items import (
    ACTIVATIONS,
    GRADIENTS,
    HOST,
    WEIGHTS,
    config_from_pick,
    contention_seconds,
    gather_seconds,
    host_bytes,
    planner_items,
    size_of,
)
from lightning_zero.budget.knapsack import Item, Pick, Variant, pick
from lightning_zero.config.options import Tuning
from lightning_zero.config.text import format_gib, format_table

__all__ = ["Line", "MemoryPlan", "with_offload_advice", "choose_plan"]

OPTIONS = {
    ACTIVATIONS: "activation_memory_budget",
    WEIGHTS: "reshard_after_forward",
    HOST: "offload",
    GRADIENTS: "stage",
}
OVER = "over copies of weights, in bfloat16"


@dataclass(frozen=True)
class Line:
    """One thing that was chosen.

    Attributes:
        what: it is about.
        choice: in words.
        nbytes: of the device that it takes at the peak.
        saved: bytes that it saves, beside the fastest way.
        seconds: of a step that it costs, beside the fastest way.
        by_hand: the user has chosen it.
    """

    what: str
    choice: str
    nbytes: int
    saved: int
    seconds: float
    by_hand: bool


@dataclass(frozen=True)
class MemoryPlan:
    """What is chosen; prints as a table.

    Attributes:
        source: how the numbers are known, in words.
        limit: bytes that the peak of the device is to stay within.
        peak: that is expected.
        chosen: the way in which memory is spent.
        lines: what that is, one by one.
        measured: the peak as it was later; None until then.
        first_step: the peak of the first step, which runs eagerly; None where nobody knows.
        seconds_known: how those in ``lines`` are, in words.
        before: what would hold the limit, had ``offload`` had it when the model was sharded; empty where nothing would.
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
        """The peak of steps behind the first one: as it was measured, or as it is expected."""
        return self.peak if self.measured is None else self.measured

    @property
    def missing(self) -> int:
        """Bytes by which the limit cannot be held, or was not."""
        return max(self.steady - self.limit, (self.first_step or 0) - self.limit, 0)

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def seconds(self) -> float:
        """Of a step that it costs, beside the fastest way."""
        return sum(line.seconds for line in self.lines)

    def options(self) -> dict[str, Any]:
        """Arguments of a strategy that choose the same by hand; those that are as by default are left out."""
        found: dict[str, Any] = {}
        if self.chosen.activation_memory_budget != 1.0:
            found["activation_memory_budget"] = self.chosen.activation_memory_budget
        if self.chosen.offload:
            found["offload"] = self.chosen.offload
        tuning: dict[str, Any] = {}
        if self.chosen.ring:
            tuning["offload_buffer_mb"] = self.chosen.ring / 2**20
        if self.chosen.over_copies:
            tuning["grad_aliasing"] = True
        return found | ({"tuning": Tuning(**tuning)} if tuning else {})

    def instead(self) -> str:
        """What to do where the limit cannot be held, in words."""
        free = "" if all(line.by_hand for line in self.lines) else "All that may be chosen is at its smallest. "
        by_hand = [OPTIONS[line.what] for line in self.lines if line.by_hand]
        if self.before:
            when = ", and has to be passed before the model is sharded" if "parameters" in self.before else ""
            free += f"offload={self.before!r} is estimated to fit{when}. "
        leave = f"leave {' and '.join(by_hand)} at the default for plans to choose, " if by_hand else ""
        return (
            f"{free}To go on, {leave}take fewer samples in a batch (and accumulate_grad_batches), write "
            "torch.utils.checkpoint into the module, or shard over more GPUs."
        )

    def with_advice(self) -> str:
        """The table, and what to do where the limit cannot be held."""
        return str(self) if self.fits else f"{self}\n{self.instead()}"

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON can hold."""
        return asdict(self) | {"missing": self.missing, "fits": self.fits}

    def in_words(self) -> str:
        """The peaks beside the limit."""
        word = "expected" if self.measured is None else "measured"
        first = (
            "" if self.first_step is None else f", of the first step, which runs eagerly, {format_gib(self.first_step)}"
        )
        more = "" if self.fits else f", {format_gib(self.missing)} more than the {format_gib(self.limit)} allowed"
        limit = f" of {format_gib(self.limit)} GiB" if self.fits and not first else " GiB"
        return f"{word} peak {format_gib(self.steady)}{limit}{first}{more}"

    def __str__(self) -> str:
        heads = "", "choice", "GiB", "GiB saved", "ms lost"
        rows = [
            (o.what, o.choice, format_gib(o.nbytes), format_gib(o.saved), f"{o.seconds * 1e3:.1f}") for o in self.lines
        ]
        told = [f"Memory plan, {self.source}: {self.in_words()}.", *format_table(heads, rows)]
        return "\n".join([*told, *([f"  seconds: {self.seconds_known}"] if self.seconds_known else [])])


def choose_plan(facts: PlannerInputs, free: Constraints, later: Sequence[str] = ()) -> MemoryPlan:
    """What to choose, of all that is free: the fewest seconds within the limit; where nothing fits, the fewest bytes.
    What is left is spent on weights that stay. Gradients that lie over copies of weights are rounded, but cost no time:
    that comes before all that does, and only where not all fits.

    The less memory there is, the less is used: of two limits the smaller one never has a plan of more bytes.

    Args:
        later: names of items about which nothing is said yet: they stay as they are.
    """
    free = replace(
        free, activations=free.activations and ACTIVATIONS not in later, weights=free.weights and WEIGHTS not in later
    )
    now, items = facts.now.over_copies, planner_items(facts, free)
    here = any(_with_masters_here(item).variants for item in items if item.name == HOST)
    if not (free.over_copies and facts.gradients.over and here):
        return _decide(facts, free, later, now)
    if _all_fits(items, facts.limit - _base(facts, False)):
        return _decide(facts, free, later, False)
    plans = [_decide(facts, free, later, over) for over in ((True, False) if now else (False, True))]
    return min(plans, key=lambda plan: (0, plan.seconds) if plan.fits else (1, plan.peak))


def _base(facts: PlannerInputs, over: bool) -> float:
    """Bytes at the peak, of all that items are not about. ``over``: gradients lie over copies of weights."""
    return facts.peak - size_of(facts.now, facts) + facts.gradients.over * (facts.now.over_copies - over)


def _with_masters_here(host: Item) -> Item:
    return replace(host, variants=tuple(one for one in host.variants if "parameters" not in one.value[0]))


def _all_fits(items: Sequence[Item], room: float) -> bool:
    """Whether each thing is had in its fastest way within ``room``, but for what only memory to spare goes to."""
    to_spare = WEIGHTS, GRADIENTS
    least = sum(min(one.nbytes for one in item.variants) for item in items if item.name in to_spare)
    fastest = [min(i.variants, key=lambda one: (one.seconds, one.nbytes)) for i in items if i.name not in to_spare]
    return least + sum(one.nbytes for one in fastest) <= room


def _decide(facts: PlannerInputs, free: Constraints, later: Sequence[str], over: bool) -> MemoryPlan:
    """``over``: gradients lie over copies of weights, which those have that lie on the device themselves."""
    items, base = planner_items(facts, free), _base(facts, over)
    if over:
        items = [_with_masters_here(item) if item.name == HOST else item for item in items]
    found = _pick_together(items, facts, facts.limit - base)
    if free.weights:
        found = _filled(found, facts, items, facts.limit - base)
    chosen = replace(config_from_pick(found.chosen, facts), over_copies=over)
    told = [pair for pair in zip(items, found.chosen, strict=True) if pair[0].name not in later]
    lines = tuple(_line(*pair) for pair in told if pair[0].name != GRADIENTS or len(pair[0].variants) > 1)
    if over and facts.gradients.over:
        lines = (Line(GRADIENTS, OVER, 0, int(facts.gradients.over), 0.0, by_hand=False), *lines)
    peak = int(base + found.nbytes)
    return MemoryPlan(facts.source, int(facts.limit), peak, chosen, lines, seconds_known=facts.speed.in_words())


def with_offload_advice(
    plan: MemoryPlan, facts: PlannerInputs, free: Constraints, before: Sequence[str], later: Sequence[str] = ()
) -> MemoryPlan:
    """The plan, with what would fit where it does not.

    Args:
        before: what could have gone to the host, had that been said before the model was sharded.
    """
    if plan.fits or not before or free.offload is None:
        return plan
    instead = choose_plan(facts, replace(free, offload=(*free.offload, *before)), later)
    return replace(plan, before=instead.chosen.offload if instead.fits else ())


def _pick_together(items: Sequence[Item], facts: PlannerInputs, room: float) -> Pick:
    """The best within ``room``, with what things that go to the host cost each other there: bytes and seconds of each
    are of it alone."""
    found = pick(items, room)
    if host_bytes(found.chosen, facts) <= facts.host and not contention_seconds(found.chosen, facts):
        return found
    activations, weights, host, gradients = items
    picks = []
    for way, leave in product(host.variants, (False, True)):

        def fits(one: Variant, way: Variant = way, leave: bool = leave) -> bool:
            if leave != ("activations" in one.value[1]):
                return False
            stay = not leave or "activations" in facts.now.offload
            return stay or host_bytes((one, weights.variants[0], way, gradients.variants[0]), facts) <= facts.host

        some = replace(activations, variants=tuple(filter(fits, activations.variants)))
        if some.variants:
            lost = contention_seconds((some.variants[0], weights.variants[0], way, gradients.variants[0]), facts)
            beside = replace(host, variants=(replace(way, seconds=way.seconds + lost),))
            picks.append(pick([some, weights, beside, gradients], room))
    fitting = [one for one in picks if one.nbytes <= room]
    return min(fitting, key=lambda one: (one.seconds, one.nbytes)) if fitting else min(picks, key=lambda o: o.nbytes)


def _filled(found: Pick, facts: PlannerInputs, items: Sequence[Item], room: float) -> Pick:
    place = next(number for number, item in enumerate(items) if item.name == WEIGHTS)
    before = found.chosen[place]
    size = int(min(max(room - found.nbytes, 0.0) + before.nbytes, facts.weights))
    if size <= before.nbytes:
        return found
    kept = Variant(size, size, gather_seconds(facts, size))
    chosen = (*found.chosen[:place], kept, *found.chosen[place + 1 :])
    return Pick(chosen, found.nbytes - before.nbytes + size, found.seconds - before.seconds + kept.seconds)


def _line(item: Item, chosen: Variant) -> Line:
    fastest = min(item.variants, key=lambda one: (one.seconds, one.nbytes))
    return Line(
        item.name,
        _in_words(item.name, chosen, item.by_hand),
        chosen.nbytes,
        fastest.nbytes - chosen.nbytes,
        max(chosen.seconds - fastest.seconds, 0.0),
        item.by_hand,
    )


def _in_words(name: str, chosen: Variant, by_hand: bool) -> str:
    mark, buffers = " (by hand)" * by_hand, ""
    if name == ACTIVATIONS:
        budget, away = chosen.value
        kept = "all saved" if budget == 1.0 else f"activation_memory_budget={budget:g}"
        words = f"{kept}, on the host" if away else kept
    elif name == WEIGHTS:
        words = f"{format_gib(chosen.nbytes)} GiB stay" if chosen.nbytes else "gathered again"
    elif name == GRADIENTS:
        words = "stay whole, reduced once a step" if chosen.value else "reduced in each pass"
    else:
        assert name == HOST
        called, (way, ring) = {"optimizer": "optimizer state", "parameters": "master weights"}, chosen.value
        words = " and ".join(called[one] for one in way) or "nothing"
        buffers = f", {format_gib(ring)} GiB of buffers" if ring else ""  # a plan's choice, whoever chose what passes
    return words + mark + buffers
