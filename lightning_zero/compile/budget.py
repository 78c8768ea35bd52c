"""``reshard_after_forward="auto"``: a budget for weights that stay, measured once training runs.

Training starts with no budget. Once no rank has compiled anything for a few optimizer steps, the ranks agree on what
the fullest of them has left, and everything is compiled once more if another weight fits in. Ranks meet between steps,
after an optimizer has stepped, and never while one of them compiles: whatever they have compiled, and when, they have
all taken as many steps.

A budget is for one pass forward and backward, in which graphs may run several times (layers that look alike share one),
and how often is not known when they are compiled. So it is handed to graphs as the share of their own weights that they
keep: the budget over the bytes that a pass gathers twice, of which half the bytes that it gathers are an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_zero.compile.context import small_weight_bytes
from lightning_zero.compile.listener import Progress
from lightning_zero.compile.plan import Gather, GraphPlan
from lightning_zero.compile.plan_book import PlanBook
from lightning_zero.config import CompileConfig
from lightning_zero.native import Executor
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge

__all__ = ["MeasuredBudget", "another_fits", "saved_share"]

MEASURED_STEPS = 3
# Where every other batch has a new length, compiling may go on for long.
MOST_STEPS = 40


@dataclass
class _Quiet:
    """Optimizer steps in a row in which nothing was compiled.

    Attributes:
        steps: how many.
        traffic: bytes that were gathered in a pass forward and backward, on average over a step; the most of any step.
        memory: of the device, in the step that left the least to spare.
    """

    steps: int = 0
    traffic: float = 0.0
    memory: DeviceMemory | None = None


class MeasuredBudget:
    """Decides for one engine's graphs.

    Args:
        progress: knows how much has been compiled, and shows lines to the user.
        plans: of the graphs that have run.
        executor: counts the bytes that are gathered.
        group: of all ranks, on the CPU.
        gauge: reads this rank's device.
    """

    def __init__(
        self,
        progress: Progress,
        plans: PlanBook,
        executor: Executor,
        group: dist.ProcessGroup,
        gauge: MemoryGauge,
    ) -> None:
        self._progress = progress
        self._plans = plans
        self._executor = executor
        self._group = group
        self._gauge = gauge
        self._bytes_until_step = 0.0
        self._wanted = False
        self.reset()

    def reset(self) -> None:
        """Measures again; for other options, with which everything is compiled again anyway. Memory that is laid out
        for weights already stays."""
        self._done = self._bytes_until_step > 0
        self._stepped = False
        self._steps = self._compiled = self._passes = self._before = 0
        self._quiet = _Quiet()

    def until_step(self, config: CompileConfig) -> float:
        """Bytes of weights that stay until the optimizer steps, as far as that is known."""
        if config.resident_until != "step":
            return 0.0
        return self._bytes_until_step if config.resident_mb == "auto" else config.resident_bytes

    def settled(self) -> bool:
        """Whether nothing is going to be compiled again for a budget."""
        return self._done or not self._wanted

    def optimizer_steps(self) -> None:
        """Must come with each step of an optimizer; harmless when repeated."""
        self._stepped = True

    def decided(self, config: CompileConfig) -> float | None:
        """The share of its weights that each graph is to keep for backward, with which everything is to be compiled
        again; None for nothing to do, and always once there was one. Must come before each pass forward and backward.
        Collective, if an optimizer has stepped since the last time."""
        self._wanted = config.enabled and config.resident_mb == "auto"
        if self.settled():
            return None
        if not self._gauge.exists:
            self._done = True
            self._progress.report(
                "reshard_after_forward='auto' keeps no parameters: this device does not tell how much memory it has."
            )
            return None
        if not self._stepped:
            self._passes += 1
            return None
        self._stepped = False
        self._steps += 1
        self._measure(self._progress.compiled + self._plans.count)
        memory = self._quiet.memory
        spare = memory.spare if memory is not None else 0
        quiet, budget, traffic = self._least(self._quiet.steps, spare, -self._quiet.traffic)
        if quiet < MEASURED_STEPS and self._steps < MOST_STEPS:
            return None
        self._done = True
        if quiet < MEASURED_STEPS:
            self._progress.report(
                f"reshard_after_forward='auto' keeps no parameters: in {MOST_STEPS} steps there were never "
                f"{MEASURED_STEPS} in a row in which compiled code ran and nothing was compiled. Set resident_mb to "
                "keep some."
            )
            return None
        return self._decide(config, budget, -traffic)

    def _measure(self, compiled: int) -> None:
        now = self._executor.counters().get("gather_bytes", 0)
        if compiled != self._compiled:
            self._quiet = _Quiet()
            self._gauge.start(anew=True)
        elif compiled:
            memory, quiet = self._gauge.read(), self._quiet
            if quiet.memory is None or memory.spare < quiet.memory.spare:
                quiet.memory = memory
            quiet.steps += 1
            quiet.traffic = max(quiet.traffic, (now - self._before) / self._passes)
        self._compiled, self._before, self._passes = compiled, now, 1

    def _decide(self, config: CompileConfig, budget: float, traffic: float) -> float | None:
        until_step = config.resident_until == "step"
        share = 0.0 if until_step else saved_share(budget, traffic)
        small_bytes = small_weight_bytes(config)
        fits = another_fits(self._plans.agreed, share, budget if until_step else 0.0, small_bytes)
        # Ranks have agreed on these plans; should one hold others all the same, it does what the rest do.
        (some,) = self._least(-fits)
        self._report(budget, "until the optimizer steps" if until_step else "from forward to backward", some < 0)
        if some == 0:
            return None
        self._bytes_until_step = budget if until_step else 0.0
        return share

    def _report(self, budget: float, until: str, fits: bool) -> None:
        memory = self._quiet.memory
        assert memory is not None
        done = f"keeping weights {until} within that; compiling once more" if fits else "no further weight fits in"
        self._progress.report(
            f"reshard_after_forward='auto': {_gib(memory.reserved)} reserved at the peak of {MEASURED_STEPS} "
            f"steps and {_gib(memory.others)} taken by others, of {_gib(memory.total)}; {_gib(budget)} "
            f"left on every rank; {done}."
        )

    def _least(self, *values: float) -> list[float]:
        """Of all ranks."""
        least = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return least.tolist()


def saved_share(budget: float, traffic: float) -> float:
    """The share of the weights that it gathers twice that each graph may keep, where a pass forward and backward
    gathers ``traffic`` bytes."""
    return min(2 * budget / traffic, 1.0) if traffic > 0 else 0.0


def another_fits(plans: Iterable[GraphPlan], share: float, budget: float, small_bytes: int) -> bool:
    """Whether a weight would stay that does not stay now: within a share of what each backward gathers, or within a
    budget of bytes until the optimizer steps, for which small weights do not count.

    Plans know the bytes of groups; the smallest weight of a group is at most as large as their mean.
    """
    for plan in plans:
        room = share * sum(gather.bytes for gather in plan.gathers) if plan.kind == "backward" else 0.0
        for mean in map(_mean_bytes, plan.gathers):
            if mean <= room or small_bytes < mean <= budget:
                return True
    return False


def _mean_bytes(gather: Gather) -> float:
    return gather.bytes / len(gather.weights)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
