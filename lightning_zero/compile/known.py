"""What a plan is made from: numbers, out of what an engine knows and has measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from lightning_zero.budget.curve import Curve, agreed, nested, told
from lightning_zero.budget.facts import CAPTURE_GAP_SHARE, GradientBytes, MemoryConfig, PlannerInputs, StepTimes
from lightning_zero.compile.first_step import FirstStepStats
from lightning_zero.compile.measuring import SteadyStats
from lightning_zero.compile.plan_book import PlanStore
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.profiling.headroom import DeviceMemory, memory_limit

__all__ = [
    "EAGER_SAVED",
    "MASTERS",
    "StepStats",
    "EngineMemoryFacts",
    "after_first_step",
    "before_training",
    "measured",
    "room_once_replayed",
]

# Of what an eager step takes beside what was there, so much is saved for backward; the rest are temporary tensors.
EAGER_SAVED = 0.8
# A first pass sets libraries up, and runs eagerly: later ones take about so much of its seconds.
LATER = 0.25
# What graphs reckon of a pass holds where it says of what is saved what was measured, but for so large a share of that.
# It does not where one of them runs several times in a pass, or was compiled for a batch of another size.
SAME = 0.2
MASTERS = "parameters"  # among what ``offload`` names


@dataclass(frozen=True)
class EngineMemoryFacts:
    """What others than the compiler know.

    Attributes:
        fixed: bytes that stay from step to step besides what optimizers keep, and what is on its way, as computed
            before there is all of it.
        states: of optimizers, as large as shards.
        to_come: of these, that were not there before the first step.
        masters: of the shards that optimizers step, that could lie on the host.
        gradients: as in :class:`~lightning_zero.budget.facts.PlannerInputs`.
        whole: of all weights, whole, in the dtype they are used in.
        ring: of the device's buffers for what lies on the host.
        ahead: as in :class:`~lightning_zero.budget.facts.PlannerInputs`.
        host: free on the host, for this rank; None where nobody says.
        may_leave: what can go to the host in this training.
        before: what could have, had that been said before the model was sharded.
        away: what lies there already, and stays.
        gather_s: seconds of gathering a byte.
        host_bytes_per_s: each way.
    """

    fixed: int = 0
    states: int = 0
    to_come: int = 0
    masters: int = 0
    gradients: GradientBytes = field(default_factory=GradientBytes)
    whole: int = 0
    ring: int = 0
    ahead: bool = True
    host: float | None = None
    may_leave: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    gather_s: float = 0.0
    host_bytes_per_s: float | None = None

    def in_training(self) -> EngineMemoryFacts:
        """Once it has begun: master weights stay where they are."""
        here = tuple(name for name in self.may_leave if name != MASTERS)
        return replace(self, may_leave=here, before=self.before if here == self.may_leave else (MASTERS,))

    def reduced_at_once(self) -> EngineMemoryFacts:
        """Where no micro-batches have been announced whose gradients could wait."""
        return replace(self, gradients=replace(self.gradients, whole=0))

    def in_place(self) -> EngineMemoryFacts:
        """Where gradients cannot lie over copies of weights."""
        return replace(self, gradients=replace(self.gradients, over=0))

    def facts(self, source: str, limit: float, peak: float, now: MemoryConfig) -> PlannerInputs:
        """With nothing known of a pass."""
        link = self.host_bytes_per_s
        known = "measured" if link else "nominal"
        speed = StepTimes(gather_s=self.gather_s, host_bytes_per_s=link or HOST_BYTES_PER_S, host_known=known)
        host = float("inf") if self.host is None else self.host
        return PlannerInputs(
            source,
            limit,
            peak,
            now,
            states=self.states,
            masters=self.masters,
            gradients=self.gradients,
            ring=self.ring,
            ahead=self.ahead,
            host=host,
            speed=speed,
        )


def before_training(
    known: EngineMemoryFacts, config: EngineConfig, memory: DeviceMemory | None, now: MemoryConfig
) -> PlannerInputs:
    """Nothing is allocated yet but shards, and nothing is known of activations: what is decided now is what cannot fit
    whatever is done about those. ``memory``: of the device, where it tells."""
    total, others = (memory.total, memory.others) if memory is not None else (float("inf"), 0)
    states = 0 if "optimizer" in now.offload else known.states
    return known.facts(
        "estimated before the first step, without activations",
        memory_limit(config.memory, total),
        others + known.fixed + states,
        now,
    )


def after_first_step(known: EngineMemoryFacts, limit: float, shown: FirstStepStats, now: MemoryConfig) -> PlannerInputs:
    """One pass has run, eagerly; the optimizer may have stepped, or not."""
    to_come = 0 if shown.stepped or "optimizer" in now.offload else known.to_come
    peak = shown.memory.here + to_come + shown.took
    facts = known.facts("estimated after the first step", limit, peak, now)
    speed = replace(facts.speed, pass_s=shown.seconds * LATER, pass_known="guessed from the first step's")
    return replace(facts, activations=EAGER_SAVED * shown.took, speed=speed)


@dataclass(frozen=True)
class StepStats:
    """Of all ranks, of each number the one that asks for most care.

    Attributes:
        steps: that were measured.
        room: bytes between the peak and the limit; below 0 where there is none.
        replayed: likewise, once the step is replayed, as far as that can be foreseen.
        forward_s: of compute in a forward, by the plans of its graphs; 0 where these do not know.
        traffic: bytes gathered in a pass.
        saved: bytes that a forward left for its backward; 0 where nobody knows.
        took: bytes that a step took at its peak, beside what was there between steps.
        pass_s: seconds of a pass.
        passes: of them in a step.
        curve: what a pass takes by the budget of activations, as its graphs reckon; None where some rank's do not.
    """

    steps: float = 0.0
    room: float = 0.0
    replayed: float = 0.0
    forward_s: float = 0.0
    traffic: float = 0.0
    saved: float = 0.0
    took: float = 0.0
    pass_s: float = 0.0
    passes: float = 1.0
    curve: Curve | None = None

    @classmethod
    def own(cls, quiet: SteadyStats, plans: PlanStore, pass_s: float, limit: Callable[[int], float]) -> StepStats:
        """One rank's. ``plans``: of its graphs. ``limit``: of a device of so many bytes."""
        found = cls(
            steps=quiet.steps,
            forward_s=sum(plan.compute_s for plan in plans.agreed_plans if plan.kind == "forward"),
            traffic=quiet.traffic,
            saved=quiet.saved,
            pass_s=pass_s,
            passes=quiet.passes,
            curve=nested([Curve(chart) for chart in plans.charts]),
        )
        if (memory := quiet.memory) is None:
            return found
        most, took = limit(memory.total), memory.allocated - memory.resident
        replayed = room_once_replayed(most, memory, quiet.outside)
        return replace(found, room=most - memory.taken, replayed=replayed, took=took)

    def of_all(self, least: Callable[..., list[float]]) -> StepStats:
        """The same on every rank. ``least``: of several numbers, the least of each that any rank gives. Collective."""
        signs = {field.name: 1 if field.name in _LEAST else -1 for field in fields(self) if field.name != "curve"}
        found = least(
            *(sign * getattr(self, name) for name, sign in signs.items()), *(-value for value in told(self.curve))
        )
        numbers = {name: sign * value for (name, sign), value in zip(signs.items(), found, strict=False)}
        return StepStats(**numbers, curve=agreed([-value for value in found[len(signs) :]]))


_LEAST = ("steps", "room", "replayed", "forward_s")


def room_once_replayed(limit: float, memory: DeviceMemory, outside: float) -> float:
    """Bytes between the peak of a step that is replayed and the limit. What the allocator keeps beside tensors now is
    given back before a capture, whose own memory is one piece with few gaps.

    Args:
        memory: at the peak of a step that runs.
        outside: bytes that a step takes in addition once it is replayed.
    """
    return limit - memory.others - memory.allocated - CAPTURE_GAP_SHARE * (memory.allocated - memory.resident) - outside


def measured(
    known: EngineMemoryFacts, limit: float, quiet: StepStats, captured: bool, now: MemoryConfig
) -> PlannerInputs:
    """Compiled steps have run, and none was compiled in them. ``captured``: they will be replayed, from memory that has
    gaps and serves nothing else."""
    facts = known.facts("measured", limit, limit - (quiet.replayed if captured else quiet.room), now)
    whole = known.whole if now.until == "step" or quiet.passes >= 2 else quiet.traffic / 2
    whole = whole if known.gather_s else 0.0  # one rank has nothing to gather
    curve, budget = quiet.curve, now.activation_memory_budget
    seen = curve is not None and quiet.saved > 0 and abs(curve.at(budget).saved / quiet.saved - 1) <= SAME
    return replace(
        facts,
        curve=curve if seen else None,
        activations=(quiet.saved or EAGER_SAVED * quiet.took) / max(budget, 0.01),
        weights=max(whole, now.weights),
        speed=replace(
            facts.speed,
            pass_s=quiet.pass_s or facts.speed.pass_s,
            forward_s=quiet.forward_s,
            passes=quiet.passes,
            pass_known="measured" if quiet.pass_s else facts.speed.pass_known,
        ),
    )
