"""What an engine's steps take, read off while it trains: optimizer steps in a row in which nothing was compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.compile.events import CompileProgress
from lightning_zero.compile.graph_plan import PlanStore
from lightning_zero.compile.uncaptured_memory import Outside
from lightning_zero.native import Executor
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge
from lightning_zero.profiling.moments import DeviceTimer

__all__ = ["StepProfiler", "SteadyStats"]


Span = tuple[Any, Any, int]


class PassClock:
    """How long the passes of a step take, by the device's clock: for some steps the host runs ahead, and by its own
    these would take next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self._moments = DeviceTimer(device)
        self.forget()

    def forget(self) -> None:
        self._began: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        self._began, self._ended = self._moments.now(), None

    def end(self, within_capture: bool) -> None:
        self._ended = None if within_capture else self._moments.now()

    def span(self, passes: int) -> list[Span]:
        """What is known of the step."""
        known = self._began is not None and self._ended is not None
        return [(self._began, self._ended, passes)] if known else []

    def least(self, spans: list[Span]) -> float:
        """Seconds of a pass, of those that the device is through with. Waits for the first of them at most; 0 where
        there is none."""
        over = [span for span in spans if self._moments.is_done(span[1])] or spans[:1]
        return min((self._moments.elapsed_s(began, ended) / passes for began, ended, passes in over), default=0.0)


@dataclass
class SteadyStats:
    """Such steps.

    Attributes:
        steps: how many.
        traffic: bytes that were gathered in a pass forward and backward, on average over a step; the most of any step.
        memory: of the device, in the step that left the least to spare.
        saved: bytes that a forward left for its backward; the most of any. 0 where no backward was announced.
        spans: of each step when its passes began, when they were over, and how many these were.
        passes: in the last of these steps.
        outside: bytes that a step takes in addition once compiled code is replayed.
    """

    steps: int = 0
    traffic: float = 0.0
    memory: DeviceMemory | None = None
    saved: int = 0
    spans: list[Span] = field(default_factory=list)
    passes: int = 1
    outside: int = 0


class StepProfiler:
    """Of one engine.

    Args:
        progress: knows how much has been compiled.
        plans: of the graphs that have run.
        executor: counts the bytes that are gathered.
        gauge: reads this rank's device.

    Attributes:
        quiet: the steps so far.
        steps: of an optimizer, since :meth:`reset`, quiet or not.
        compiles: steps count only once something has been compiled.
        captures: what is compiled will be replayed, and what that takes is looked for in the second quiet step.
        stepped: an optimizer has stepped since the last pass.
        outside: looks for it.
    """

    def __init__(self, progress: CompileProgress, plans: PlanStore, executor: Executor, gauge: MemoryGauge) -> None:
        self._progress = progress
        self._plans = plans
        self._executor = executor
        self._gauge = gauge
        self.compiles = True
        self.captures = self.stepped = False
        self.outside = Outside(gauge)
        self._clock = PassClock(gauge.device)
        self.reset()

    def reset(self) -> None:
        """Everything begins anew."""
        self.stepped = False
        self.steps = self._compiled = self._passes = self._gathered = 0
        self._clock.forget()
        self._resident = 0
        self.quiet = SteadyStats()
        self.outside.drop()

    def again(self) -> None:
        """What comes is another training: quiet steps are counted from here on."""
        self.steps, self.quiet = 0, SteadyStats()
        self.outside.drop()
        self._gauge.start(anew=True)

    def optimizer_steps(self) -> None:
        """Must come with each step of an optimizer; harmless when repeated."""
        if not self.stepped:
            self.stepped = True
            self._clock.end(within_capture=self._gauge.is_capturing)

    def pass_begins(self) -> bool:
        """Whether an optimizer has stepped since the last one."""
        stepped, self.stepped = self.stepped, False
        if stepped:
            self.steps += 1
            self._step_ended()
        else:
            self._passes += 1
        if self.quiet.steps:
            self._resident = self._gauge.read().resident
        return stepped

    def backward_begins(self) -> None:
        """A forward is over."""
        if self.quiet.steps:
            self.quiet.saved = max(self.quiet.saved, self._gauge.read().resident - self._resident)

    def _step_ended(self) -> None:
        gathered = self._executor.counters().get("gather_bytes", 0)
        compiled = self._progress.compiled + self._plans.count
        if compiled != self._compiled:
            self.quiet = SteadyStats()
            self.outside.drop()
            self._gauge.start(anew=True)
        elif compiled or not self.compiles:
            self._count(gathered - self._gathered)
        self._compiled, self._gathered, self._passes = compiled, gathered, 1
        self._clock.begin()

    def pass_s(self) -> float:
        """Seconds of a pass, on average over a quiet step, without the optimizer's, in which copies may be waited for;
        see :meth:`PassClock.least`."""
        return self._clock.least(self.quiet.spans)

    def _count(self, gathered: int) -> None:
        memory, quiet, passes = self._gauge.read(), self.quiet, max(self._passes, 1)
        if quiet.memory is None or memory.taken > quiet.memory.taken:
            quiet.memory = memory
        quiet.steps += 1
        quiet.outside = max(quiet.outside, self.outside.end())
        if quiet.steps == 1 and self.captures:
            self.outside.begin()
        quiet.passes = passes
        quiet.traffic = max(quiet.traffic, gathered / passes)
        quiet.spans += self._clock.span(passes)
