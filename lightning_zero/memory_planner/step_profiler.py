"""Measure a training's steps while it runs: consecutive optimizer steps in which nothing is compiled.

:class:`StepProfiler` collects one rank's numbers, :class:`StepStats` combines those of all ranks, and
:func:`measured_inputs` makes planner inputs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_zero.config import EngineConfig
from lightning_zero.memory_planner.first_step_memory import FirstStepStats
from lightning_zero.memory_planner.inputs import CAPTURE_GAP_SHARE, EngineMemoryFacts, MemoryConfig, PlannerInputs
from lightning_zero.profiling.device_gauges import DeviceMemory, DeviceTimer, MemoryGauge, memory_limit

# Share of an eager step's extra memory that is saved for backward. The rest is temporary.
EAGER_SAVED_SHARE = 0.8
# Estimate of a later pass's seconds, as a share of the eager first pass, which also initializes libraries.
LATER_PASS_SHARE = 0.25

Span = tuple[Any, Any, int]  # begin, end, number of passes


@dataclass
class SteadyStats:
    """Measurements of one rank's steady steps.

    Attributes:
        steps: number of steps.
        traffic: bytes gathered in a pass, averaged over a step; the maximum of all steps.
        memory: the device in the step with the highest peak.
        saved: bytes that a forward left for its backward; 0 if no backward was announced.
        spans: begin and end of each step's passes, and their number.
    """

    steps: int = 0
    traffic: float = 0.0
    memory: DeviceMemory | None = None
    saved: int = 0
    spans: list[Span] = field(default_factory=list)
    passes: int = 1


class StepProfiler:
    """Profiles the steps of one engine.

    Args:
        compiled: returns a count that grows whenever something is compiled.

    Attributes:
        steps: optimizer steps since :meth:`reset`, steady or not.
        compiles: steps count only once something was compiled.
        stepped: an optimizer has stepped since the last pass.
    """

    def __init__(self, compiled: Callable[[], int], gathered: Callable[[], int], gauge: MemoryGauge) -> None:
        self._compiled_now, self._gathered_now = compiled, gathered
        self._gauge = gauge
        # Device time: the host may run ahead of the device.
        self._timer = DeviceTimer(gauge.device)
        self.compiles = True
        self.stepped = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.stepped = False
        self.steps = self._compiled = self._passes = self._gathered = self._allocated = 0
        self._began: Any = None
        self._ended: Any = None
        self.stats = SteadyStats()

    def restart(self) -> None:
        """Count steady steps from here on, because the configuration has changed."""
        self.steps, self.stats = 0, SteadyStats()
        self._gauge.start(anew=True)

    def optimizer_steps(self) -> None:
        """Call with each optimizer step; repeated calls have no effect."""
        if not self.stepped:
            self.stepped = True
            self._ended = None if self._gauge.is_capturing else self._timer.now()

    def pass_begins(self) -> bool:
        """Call before each pass. Return True if an optimizer has stepped since the last one."""
        stepped, self.stepped = self.stepped, False
        if stepped:
            self.steps += 1
            self._step_ended()
        else:
            self._passes += 1
        if self.stats.steps:
            self._allocated = self._gauge.read().allocated_now
        return stepped

    def backward_begins(self) -> None:
        """Call between forward and backward."""
        if self.stats.steps:
            self.stats.saved = max(self.stats.saved, self._gauge.read().allocated_now - self._allocated)

    def pass_seconds(self) -> float:
        """Return the seconds of the fastest finished pass without the optimizer; 0 without one.

        Waits for the first step at most.
        """
        spans = self.stats.spans
        over = [span for span in spans if self._timer.is_done(span[1])] or spans[:1]
        return min((self._timer.elapsed_s(began, ended) / passes for began, ended, passes in over), default=0.0)

    def _step_ended(self) -> None:
        gathered, compiled = self._gathered_now(), self._compiled_now()
        if compiled != self._compiled:
            self.stats = SteadyStats()
            self._gauge.start(anew=True)
        elif compiled or not self.compiles:
            self._count(gathered - self._gathered)
        self._compiled, self._gathered, self._passes = compiled, gathered, 1
        self._began, self._ended = self._timer.now(), None

    def _count(self, gathered: int) -> None:
        memory, stats, passes = self._gauge.read(), self.stats, max(self._passes, 1)
        if stats.memory is None or memory.taken > stats.memory.taken:
            stats.memory = memory
        stats.steps += 1
        stats.passes = passes
        stats.traffic = max(stats.traffic, gathered / passes)
        if self._began is not None and self._ended is not None:
            stats.spans.append((self._began, self._ended, passes))


@dataclass(frozen=True)
class StepStats:
    """Steady steps of all ranks: of each number the value of the rank that is worst off.

    Attributes:
        steps: number of steps.
        room: bytes between the peak and the limit; negative if it is exceeded.
        captured_room: expected ``room`` once steps are CUDA graphs, which are captured after the cache is emptied.
        forward_s: compute seconds of a forward by its graphs' cost estimates; 0 if unknown.
        traffic: bytes gathered in a pass.
        saved: bytes that a forward left for its backward; 0 if unknown.
        took: bytes of a step's peak in addition to those that persist.
        pass_s: seconds of a pass.
    """

    steps: float = 0.0
    room: float = 0.0
    captured_room: float = 0.0
    forward_s: float = 0.0
    traffic: float = 0.0
    saved: float = 0.0
    took: float = 0.0
    pass_s: float = 0.0
    passes: float = 1.0

    @classmethod
    def of_rank(cls, stats: SteadyStats, forward_s: float, pass_s: float, limit: Callable[[int], float]) -> StepStats:
        """Return one rank's numbers. ``limit``: maps the device's bytes to those that may be taken."""
        found = cls(stats.steps, 0.0, 0.0, forward_s, stats.traffic, stats.saved, 0.0, pass_s, stats.passes)
        if (memory := stats.memory) is None:
            return found
        took = memory.allocated - memory.allocated_now
        room = limit(memory.total) - memory.others
        return replace(
            found,
            room=room - memory.reserved,
            captured_room=room - memory.allocated - CAPTURE_GAP_SHARE * took,
            took=took,
        )

    def of_all(self, least: Callable[..., list[float]]) -> StepStats:
        """Return the same numbers on every rank. ``least``: reduces each number to its minimum. Collective."""
        smallest = ("steps", "room", "captured_room", "forward_s")
        signs = {one.name: 1 if one.name in smallest else -1 for one in fields(self)}
        found = least(*(sign * getattr(self, name) for name, sign in signs.items()))
        return StepStats(**{name: sign * value for (name, sign), value in zip(signs.items(), found, strict=True)})


def setup_inputs(
    facts: EngineMemoryFacts, config: EngineConfig, memory: DeviceMemory | None, current: MemoryConfig
) -> PlannerInputs:
    """Return inputs before the first step, without activations.

    Args:
        memory: of the device; None if it does not report any.
    """
    total, others = (memory.total, memory.others) if memory is not None else (float("inf"), 0)
    states = 0 if "optimizer" in current.offload else facts.states
    source = "estimated before the first step, without activations"
    taken = others + facts.fixed + facts.matrix_updates + states
    return facts.inputs(source, memory_limit(config.memory, total), taken, current)


def first_step_inputs(
    facts: EngineMemoryFacts, limit: float, stats: FirstStepStats, current: MemoryConfig
) -> PlannerInputs:
    """Return inputs after one eager pass, with or without an optimizer step."""
    states = 0 if "optimizer" in current.offload else facts.unallocated_states
    to_come = 0 if stats.stepped else states + facts.matrix_updates
    peak = stats.memory.here + to_come + stats.took
    inputs = facts.inputs("estimated after the first step", limit, peak, current)
    times = replace(inputs.times, pass_s=stats.seconds * LATER_PASS_SHARE, pass_known="guessed from the first step's")
    return replace(inputs, activations=EAGER_SAVED_SHARE * stats.took, times=times)


def measured_inputs(
    facts: EngineMemoryFacts, limit: float, stats: StepStats, captured: bool, current: MemoryConfig
) -> PlannerInputs:
    """Return inputs after steady steps. ``captured``: they will become CUDA graphs."""
    inputs = facts.inputs("measured", limit, limit - (stats.captured_room if captured else stats.room), current)
    weights = facts.full_weights if current.until == "step" or stats.passes >= 2 else stats.traffic / 2
    weights = weights if facts.gather_s else 0.0  # one rank gathers nothing
    times = replace(
        inputs.times,
        pass_s=stats.pass_s or inputs.times.pass_s,
        forward_s=stats.forward_s,
        passes=stats.passes,
        pass_known="measured" if stats.pass_s else inputs.times.pass_known,
    )
    return replace(
        inputs,
        activations=(stats.saved or EAGER_SAVED_SHARE * stats.took) / max(current.activation_memory_budget, 0.01),
        weights=max(weights, current.weights),
        times=times,
    )
