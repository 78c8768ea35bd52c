"""What an engine's steps take, read off while it trains: optimizer steps in a row in which nothing was compiled."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_zero.compile.listener import Progress
from lightning_zero.compile.outside import Outside
from lightning_zero.compile.plan_book import PlanBook
from lightning_zero.native import Executor
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge

__all__ = ["Measuring", "Quiet"]


@dataclass
class Quiet:
    """Such steps.

    Attributes:
        steps: how many.
        traffic: bytes that were gathered in a pass forward and backward, on average over a step; the most of any step.
        memory: of the device, in the step that left the least to spare.
        saved: bytes that a forward left for its backward; the most of any. 0 where no backward was announced.
        pass_s: seconds of a pass, on average over a step, by the host's clock; of the fastest step.
        passes: in the last of these steps.
        outside: bytes that a step takes in addition once compiled code is replayed.
    """

    steps: int = 0
    traffic: float = 0.0
    memory: DeviceMemory | None = None
    saved: int = 0
    pass_s: float = 0.0
    passes: int = 1
    outside: int = 0


class Measuring:
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
        stepped: an optimizer has stepped since the last pass; whoever sees that sets it.
        outside: looks for it.
    """

    def __init__(self, progress: Progress, plans: PlanBook, executor: Executor, gauge: MemoryGauge) -> None:
        self._progress = progress
        self._plans = plans
        self._executor = executor
        self._gauge = gauge
        self.compiles = True
        self.captures = self.stepped = False
        self.outside = Outside(gauge)
        self.reset()

    def reset(self) -> None:
        """Everything begins anew."""
        self.stepped = False
        self.steps = self._compiled = self._passes = self._gathered = 0
        self._began: float | None = None  # when the step did
        self._resident = 0
        self.quiet = Quiet()
        self.outside.drop()

    def again(self) -> None:
        """What comes is another training: quiet steps are counted from here on."""
        self.steps, self.quiet = 0, Quiet()
        self.outside.drop()
        self._gauge.start(anew=True)

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
        gathered, now = self._executor.counters().get("gather_bytes", 0), time.perf_counter()
        compiled = self._progress.compiled + self._plans.count
        if compiled != self._compiled:
            self.quiet = Quiet()
            self.outside.drop()
            self._gauge.start(anew=True)
        elif compiled or not self.compiles:
            self._count(gathered - self._gathered, now)
        self._compiled, self._gathered, self._passes, self._began = compiled, gathered, 1, now

    def _count(self, gathered: int, now: float) -> None:
        memory, quiet, passes = self._gauge.read(), self.quiet, max(self._passes, 1)
        if quiet.memory is None or memory.taken > quiet.memory.taken:
            quiet.memory = memory
        quiet.steps += 1
        quiet.outside = max(quiet.outside, self.outside.end())
        if quiet.steps == 1 and self.captures:
            self.outside.begin()
        quiet.passes = passes
        quiet.traffic = max(quiet.traffic, gathered / passes)
        if self._began is not None:
            took = (now - self._began) / passes
            quiet.pass_s = min(quiet.pass_s or took, took)
