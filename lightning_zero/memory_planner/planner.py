"""Measure a training and decide how it spends memory.

:class:`MemoryPlanner` serves ``memory=`` and ``reshard_after_forward="auto"``. Setup decides what must move before the
model trains. The eager first step stays within the limit, and the planner prepares for what would not fit compiled.
After a few steady steps the ranks agree on their measurements, and everything compiles once more if the plan changes.
Later the planner checks the peak once. Above the limit it empties the cache, plans once more, disables CUDA graphs, and
warns if none of that is enough. From then on the limit is held, or the user has been warned.

Invariant: ranks communicate only before passes that follow an optimizer step, so all ranks have taken equally many.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from lightning_zero.config import CompileConfig, EngineConfig
from lightning_zero.config.text import format_bytes
from lightning_zero.memory_planner.allocator_cache import AllocatorCacheLimit
from lightning_zero.memory_planner.choices import ACTIVATIONS, WEIGHTS, with_measured_peak
from lightning_zero.memory_planner.first_step_memory import FirstStep
from lightning_zero.memory_planner.inputs import (
    MASTERS,
    Constraints,
    EngineMemoryFacts,
    MemoryConfig,
    PlannerInputs,
    constraints_of,
    memory_config,
)
from lightning_zero.memory_planner.memory_plan import MemoryPlan, choose_plan, with_offload_advice
from lightning_zero.memory_planner.step_profiler import (
    EAGER_SAVED_SHARE,
    StepProfiler,
    StepStats,
    first_step_inputs,
    measured_inputs,
    setup_inputs,
)
from lightning_zero.mesh import all_min
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge, memory_limit

MEASURED_STEPS = 3
# Steps after which measuring ends if batches of new lengths keep compiling.
MAX_STEPS = 40
# Compiled code runs a few times before it is captured; the check has to see the captures.
CHECKED_STEPS = 6
# Margins of a changed plan, because its numbers were measured under the old one. As shares of the limit (peaks exceeded
# plans by 0.8 %), and of activations saved in addition (1.4 GiB of peak were measured for 0.8 GiB of them).
LIMIT_MARGIN = 0.01
ACTIVATION_MARGIN = 0.75
# Least memory of a compiled pass, as a share of an eager one.
COMPILED_SHARE = 0.5


@dataclass(frozen=True)
class CompilerAccess:
    """Functions of the compiler that the planner calls.

    Attributes:
        compiled: returns a count that grows whenever something is compiled.
        gathered: returns the bytes of weights gathered so far.
        forward_s: returns the estimated compute seconds of the current forward graphs.
        keeps_more: returns True if another weight would be kept, for a share of each backward's weights and a number
            of bytes until the optimizer steps.
        captures: returns True if compiled code is captured as CUDA graphs.
        disable_captures: disables CUDA graphs for a reason; returns True if that changed anything.
    """

    compiled: Callable[[], int]
    gathered: Callable[[], int]
    forward_s: Callable[[], float]
    keeps_more: Callable[[float, float], bool]
    captures: Callable[[], bool]
    disable_captures: Callable[[str], bool]


@dataclass(frozen=True)
class PlanUpdate:
    """A new configuration.

    Attributes:
        share: share of its weights that each graph keeps for backward, for which everything compiles again; None if
            that has not changed.
    """

    chosen: MemoryConfig
    share: float | None = None


@dataclass
class PlannerState:
    """Progress of the decisions for one training.

    Attributes:
        done: nothing compiles again except after a failed check.
        first_peak: peak of the first step on the fullest rank.
        warned_first_step: the user was warned that the first step exceeded the limit.
        checking: the peak under the plan is being measured.
        emptied: the allocator's cache was emptied after a failed check.
        replanned: the plan was changed after a failed check.
        inputs: of the last plan within a limit.
        traffic: bytes that a pass gathered when it was made.
    """

    done: bool = False
    saw_first_step: bool = False
    first_peak: int | None = None
    warned_first_step: bool = False
    checking: bool = False
    emptied: bool = False
    replanned: bool = False
    inputs: PlannerInputs | None = None
    traffic: float = 0.0


class MemoryPlanner:
    """Decides for one engine.

    Attributes:
        plan: the last plan; None without a limit, or before anything is known.
        first_step: keeps the first step within the limit.
        cache: keeps the allocator's cache of later steps within it.
    """

    def __init__(
        self, report: Callable[[str], None], compiler: CompilerAccess, group: dist.ProcessGroup, gauge: MemoryGauge
    ) -> None:
        self._reporter = MemoryReporter(report, group)
        self._compiler = compiler
        self._group = group
        self._gauge = gauge
        self._profiler = StepProfiler(compiler.compiled, compiler.gathered, gauge)
        self._apply: Callable[[EngineConfig, MemoryConfig], None] = lambda config, chosen: None
        self._accumulates: Callable[[], bool] = lambda: False
        self.cache = AllocatorCacheLimit(gauge, report)
        self.known = EngineMemoryFacts()
        self.plan: MemoryPlan | None = None
        self._current: MemoryConfig | None = None  # None: as the options say
        self._wanted = False
        self.reset()

    def connect(self, apply: Callable[[EngineConfig, MemoryConfig], None], accumulates: Callable[[], bool]) -> None:
        """Connect the engine.

        Args:
            apply: applies options and a configuration to everything that does not compile.
            accumulates: returns True if micro-batches were announced whose gradients can wait.
        """
        self._apply, self._accumulates = apply, accumulates

    def reset(self, forget: bool = False) -> None:
        """Measure again, because other options compile everything again.

        Args:
            forget: also forget the weights that are kept until the optimizer steps, whose memory is allocated.
        """
        allocated = self._current is not None and self._current.until == "step" and self._current.weights > 0
        done = allocated and self.plan is None and not forget
        if not done:
            self._current = self.plan = None
        self._state = PlannerState(done)
        self.first_step = FirstStep(self._gauge)
        self._profiler.reset()

    def apply(self, config: EngineConfig, chosen: MemoryConfig) -> None:
        """Apply options, with ``chosen`` filled in, to everything that does not compile."""
        self._apply(config, chosen)

    def step_cache_bytes(self, config: CompileConfig) -> float:
        """Return the bytes of weights that are kept until the optimizer steps, as far as they are known."""
        if self._current is not None and self._current.until == "step":
            return self._current.weights
        return config.unsharded_cache_bytes if config.unsharded_cache_until == "step" else 0.0

    def is_settled(self) -> bool:
        """Return True if no decision is pending; only then are CUDA graphs captured."""
        return self._state.done or not self._wanted

    def current(self, config: EngineConfig) -> MemoryConfig:
        """Return the configuration in force."""
        return self._current or memory_config(config, self.known.on_host)

    @property
    def has_begun(self) -> bool:
        """Return True if anything was measured, so that other code requires :meth:`reset`."""
        return self.first_step.before is not None or self._state.done or self._profiler.steps > 0

    def empty_cache(self) -> None:
        """Empty the allocator's cache."""
        self._gauge.empty()

    # -- called by the engine

    def optimizer_steps(self) -> None:
        """Call with each optimizer step; repeated calls have no effect."""
        self._profiler.optimizer_steps()
        self.first_step.optimizer_steps()

    def backward_begins(self) -> None:
        """Call between forward and backward."""
        self.first_step.backward_begins()
        # Reading the device in each backward would cost time for the rest of the training.
        if (self.plan is not None or self._state.saw_first_step) and not self.is_settled():
            self._profiler.backward_begins()

    def plan_before_training(self, config: EngineConfig, known: EngineMemoryFacts) -> PlanUpdate | None:
        """Plan what must move before the model trains. Collective with a limit; may be repeated."""
        if config.memory is None:
            self.known = known.during_training()
            return None
        host, link = self._least(known.host_free or 0.0, known.host_bytes_per_s or 0.0)
        known = replace(known, host_free=host or None, host_bytes_per_s=link or None)
        self.known = known.during_training()
        reports = self._gauge.reports_memory
        if self.first_step.before is not None or (not reports and config.memory == "auto"):
            return None
        current = memory_config(config, known.on_host)
        inputs = setup_inputs(known, config, self._gauge.read() if reports else None, current)
        (room,) = self._least(inputs.limit - inputs.peak)
        inputs = replace(inputs, peak=inputs.limit - room)
        free, later = constraints_of(config, known.offloadable), (ACTIVATIONS, WEIGHTS)
        plan = with_offload_advice(choose_plan(inputs, free, later), inputs, free, known.before_sharding, later)
        if MASTERS in plan.chosen.offload:
            self.known = replace(self.known, before_sharding=())
        self.plan, self._current = plan, plan.chosen
        if not reports or plan.chosen != current or not plan.fits:
            self._show(config)
        return PlanUpdate(plan.chosen)

    def stop_grad_aliasing(self) -> PlanUpdate | None:
        """Rule out aliased gradients; return a new configuration if the current one has them."""
        self.known = known = self.known.without_grad_aliasing()
        if self._state.inputs is not None:
            self._state.inputs = replace(self._state.inputs, gradients=known.gradients)
        if self._current is None or not self._current.grad_aliasing:
            return None
        self._current = replace(self._current, grad_aliasing=False)
        self.plan = self.plan and replace(self.plan, chosen=self._current)
        return PlanUpdate(self._current)

    def update(self, config: EngineConfig) -> PlanUpdate | None:
        """Return a new configuration, or None. Call before each pass.

        Collective before the second pass, and if an optimizer has stepped since the last call.
        """
        auto = config.compile and config.unsharded_cache_mb == "auto"
        self._wanted = config.memory is not None or auto
        if self.is_settled() and not self._state.checking:
            return None
        if not self._gauge.reports_memory:
            self._state.done = True
            self._reporter.no_device(config, auto)
            return None
        self._profiler.compiles = config.compile
        early = None if self._state.saw_first_step or config.memory is None else self._after_first_step(config)
        stepped = self._profiler.pass_begins()
        if early is not None or not stepped:
            return early
        rank = StepStats.of_rank(
            self._profiler.stats,
            self._compiler.forward_s(),
            self._profiler.pass_seconds(),
            partial(memory_limit, config.memory),
        )
        stats = rank.of_all(self._least)
        if self._state.checking:
            return self._check(config, stats)
        if stats.steps < MEASURED_STEPS and self._profiler.steps < MAX_STEPS:
            return None
        self._state.done = True
        if stats.steps < MEASURED_STEPS:
            self._reporter.never_steady(config)
            return None
        return self._decide(config, stats)

    # -- decisions

    def _after_first_step(self, config: EngineConfig) -> PlanUpdate | None:
        """Begin the first step; before the second one, plan compiled steps within the limit."""
        if self.first_step.before is None:
            self.first_step.begin(config.memory)
            return None
        self._state.saw_first_step = True
        stats, current = self.first_step.end(), self.current(config)
        limit = memory_limit(config.memory, stats.memory.total)
        inputs = first_step_inputs(self.known, limit, stats, current)
        (room,) = self._least(limit - stats.memory.taken)
        self._state.first_peak = int(limit - room)
        if stats.offloaded:
            self._reporter.report(
                f"{option(config)}: {format_bytes(stats.offloaded)} of the activations of the first step, which ran "
                "eagerly, were on the host until its backward."
            )
        room, saved, pass_s = self._least(inputs.limit - inputs.peak, -inputs.activations, -inputs.times.pass_s)
        times = replace(inputs.times, pass_s=-pass_s)
        inputs = replace(inputs, peak=inputs.limit - room, activations=-saved, times=times)
        # Offloading activations needs the measured time of a pass.
        free = constraints_of(config, {*self.known.offloadable} - {ACTIVATIONS})
        # Compiled steps may take less: do not round gradients before that is measured.
        least = inputs.peak - (1 - COMPILED_SHARE) * inputs.activations / EAGER_SAVED_SHARE
        free = replace(free, grad_aliasing=free.grad_aliasing and least > inputs.limit)
        plan = self._choose(inputs, free, later=(WEIGHTS,))
        if plan.chosen == current and plan.fits:
            return None
        self.plan, self._current = plan, plan.chosen
        self._show(config)
        return PlanUpdate(plan.chosen)

    def _choose(self, inputs: PlannerInputs, free: Constraints, later: Sequence[str] = ()) -> MemoryPlan:
        """Return a plan that leaves a margin if it changes the configuration."""
        plan = choose_plan(inputs, free, later)
        if plan.chosen != inputs.current:
            more = max(plan.chosen.activation_memory_budget - inputs.current.activation_memory_budget, 0.0)
            limit = (1 - LIMIT_MARGIN) * inputs.limit - ACTIVATION_MARGIN * more * inputs.activations
            # The margin alone is no reason to round gradients.
            rounded = plan.chosen.grad_aliasing or inputs.current.grad_aliasing
            careful = replace(free, grad_aliasing=free.grad_aliasing and rounded)
            plan = replace(choose_plan(replace(inputs, limit=limit), careful, later), limit=plan.limit)
        plan = with_offload_advice(plan, inputs, free, self.known.before_sharding, later)
        return replace(plan, first_step=self._state.first_peak)

    def _decide(self, config: EngineConfig, stats: StepStats) -> PlanUpdate | None:
        memory, current = self._profiler.stats.memory, self.current(config)
        assert memory is not None
        limited = config.memory is not None
        known = self.known if self._accumulates() else self.known.without_deferred_reduction()
        captured = limited and self._compiler.captures()
        inputs = measured_inputs(known, memory_limit(config.memory, memory.total), stats, captured, current)
        if limited:
            self._state.inputs, self._state.traffic = inputs, stats.traffic
            return self._decide_within_limit(inputs, config, stats.traffic)
        # reshard_after_forward="auto": only weights are chosen.
        weights = max(stats.room, 0.0) if current.until == "step" else stats.traffic / 2
        inputs = replace(inputs, weights=weights, times=replace(inputs.times, passes=1.0))
        plan = choose_plan(inputs, constraints_of(config, self.known.offloadable))
        fits = self._keeps_more(plan.chosen, stats.traffic)
        self._reporter.weights(memory, stats.room, current.until, fits)
        self._current = plan.chosen if fits else None
        return PlanUpdate(plan.chosen, _saved_share(plan.chosen, stats.traffic)) if fits else None

    def _decide_within_limit(self, inputs: PlannerInputs, config: EngineConfig, traffic: float) -> PlanUpdate | None:
        free, current = constraints_of(config, self.known.offloadable), self.current(config)
        plan = self._choose(inputs, free)
        keeps_more = self._keeps_more(plan.chosen, traffic)
        if not keeps_more and inputs.current.weights == 0:
            plan = self._choose(inputs, free, later=(WEIGHTS,))
        self.plan, self._current = plan, plan.chosen
        self._show(config)
        self._state.checking, self._state.emptied = True, False
        self._profiler.restart()
        recompiles = keeps_more or (plan.chosen.activation_memory_budget, plan.chosen.weights) != (
            current.activation_memory_budget,
            current.weights,
        )
        if plan.chosen == current:
            return None
        return PlanUpdate(plan.chosen, _saved_share(plan.chosen, traffic) if recompiles else None)

    def _keeps_more(self, chosen: MemoryConfig, traffic: float) -> bool:
        share = _saved_share(chosen, traffic)
        keeps = self._compiler.keeps_more(share, chosen.weights if chosen.until == "step" else 0.0)
        # Ranks agree on their graphs' plans; should they differ all the same, all ranks do the same.
        return self._least(-keeps)[0] < 0

    def _check(self, config: EngineConfig, stats: StepStats) -> PlanUpdate | None:
        """Return a new configuration if the peak exceeds the limit and another one may hold it."""
        state = self._state
        if stats.steps < CHECKED_STEPS and self._profiler.steps < MAX_STEPS:
            return None
        state.checking = False
        if self.plan is None or not stats.steps:
            return None
        memory = self._profiler.stats.memory
        assert memory is not None
        limit = memory_limit(config.memory, memory.total)
        if stats.room < 0 and not state.emptied:
            # Code that ran before it was captured has left cached memory that CUDA graphs cannot use.
            state.emptied = state.checking = True
            self._profiler.restart()
            return None
        self.plan = plan = replace(self.plan, measured=int(limit - stats.room))
        self._reporter.report(
            f"{option(config)}: the peak is {format_bytes(plan.steady)}, of {format_bytes(limit)}; "
            f"{format_bytes(plan.peak)} were expected."
        )
        if stats.room >= 0:
            return None
        free = constraints_of(config, self.known.offloadable)
        if state.inputs is not None:
            inputs = with_measured_peak(state.inputs, plan.chosen, plan.steady)
            if not state.replanned:
                state.replanned, state.inputs = True, inputs
                if choose_plan(inputs, free).chosen != plan.chosen:
                    return self._decide_within_limit(inputs, config, state.traffic)
            self.plan = plan = with_offload_advice(plan, inputs, free, self.known.before_sharding)
        reason = f"they take {format_bytes(-stats.room)} more than {option(config)} allows"
        if self._compiler.disable_captures(reason):
            state.checking = True
            self._profiler.restart()
            return None
        self._reporter.warn(f"{option(config)} is exceeded by {format_bytes(-stats.room)}. {plan.advice()}")
        return None

    def _show(self, config: EngineConfig) -> None:
        assert self.plan is not None
        self._state.warned_first_step |= self._reporter.plan(self.plan, config, self._state.warned_first_step)

    def _least(self, *values: float) -> list[float]:
        """Return the minimum of each value over all ranks."""
        return all_min(torch.tensor(values, dtype=torch.float64), self._group).tolist()


class MemoryReporter:
    """Messages about one engine's memory.

    Args:
        group: all ranks; rank 0 warns.
    """

    def __init__(self, report: Callable[[str], None], group: dist.ProcessGroup) -> None:
        self.report = report
        self._group = group

    def weights(self, memory: DeviceMemory, room: float, until: str, fits: bool) -> None:
        """Report a decision about weights alone: ``room`` bytes are left on every rank."""
        how_long = "until the optimizer steps" if until == "step" else "from forward to backward"
        done = f"keeping weights {how_long} within that; compiling once more" if fits else "no further weight fits in"
        self.report(
            f"reshard_after_forward='auto': {format_bytes(memory.reserved)} reserved at the peak of the measured "
            f"steps and {format_bytes(memory.others)} taken by others, of {format_bytes(memory.total)}; "
            f"{format_bytes(max(room, 0.0))} left on every rank; {done}."
        )

    def no_device(self, config: EngineConfig, auto: bool) -> None:
        """Report that the device does not report its memory. ``auto``: weights should be kept."""
        why = "this device does not tell how much memory it has"
        if auto:
            self.report(f"reshard_after_forward='auto' keeps no parameters: {why}.")
        if config.memory == "auto":
            self.report(f"memory='auto' changes nothing: {why}. Give a number of GiB.")

    def never_steady(self, config: EngineConfig) -> None:
        """Report that too few consecutive steps ran without compiling."""
        what, instead = ("nothing", "") if config.memory is not None else ("no parameters", "Set unsharded_cache_mb")
        self.report(
            f"{option(config)} keeps {what}: in {MAX_STEPS} steps there were never {MEASURED_STEPS} in a row in which "
            f"compiled code ran and nothing was compiled. {instead or 'The plan so far stays'} to keep some."
        )

    def plan(self, plan: MemoryPlan, config: EngineConfig, warned_first_step: bool) -> bool:
        """Report a plan. Return True if this warned that the first step exceeded the limit."""
        self.report(str(plan))
        first = not warned_first_step and (plan.first_step or 0) > plan.limit
        if first or plan.steady > plan.limit:
            self.warn(
                f"{option(config)} cannot be held: {format_bytes(plan.missing)} more are needed. "
                f"{plan.summary()} {plan.advice()}"
            )
        return first

    def warn(self, line: str) -> None:
        if dist.get_rank(self._group) == 0:
            warnings.warn(line, stacklevel=2)


def option(config: EngineConfig) -> str:
    """Return the option that asks for a decision."""
    return f"memory={config.memory!r}" if config.memory is not None else "reshard_after_forward='auto'"


def _saved_share(chosen: MemoryConfig, traffic: float) -> float:
    """Return the share of its weights that each graph keeps for backward.

    Graphs run several times in a pass and do not know how often, so the budget is a share of the bytes that a pass
    gathers twice. Half of the gathered bytes, ``traffic``, is an upper bound of these.
    """
    if chosen.until != "backward":
        return 0.0
    return min(2 * chosen.weights / traffic, 1.0) if traffic > 0 else 0.0
