"""``memory=`` and ``reshard_after_forward="auto"``: what a training needs is measured once it runs, and what is left is
spent by plan.

Training starts with little kept. Where there is a limit, the first step, which runs eagerly, is held within it (see
``first_step.py``) and looked at before anything is compiled: what would not fit is planned away. Once no rank has
compiled anything for a few optimizer steps, the ranks agree on what the fullest of them has left, and everything is
compiled once more if that changes anything. Then nothing is captured for replays before a step has shown what these
would take. Afterwards it is looked whether the limit was held: where it was not, what the allocator keeps is given
back, and where that does not help, it is planned and compiled once more. Where replays would pass the limit, or do, and
no plan helps, there are none: a limit is a promise, and replays are not.
Ranks meet before passes, which are collective anyway, and never while one of them compiles: whatever they have
compiled, and when, they have all taken as many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from lightning_zero.budget.facts import MemoryConfig, PlannerInputs, Constraints
from lightning_zero.budget.items import ACTIVATIONS, WEIGHTS, with_measured_peak
from lightning_zero.budget.options import memory_config, constraints_of
from lightning_zero.budget.plan import MemoryPlan, with_offload_advice, choose_plan
from lightning_zero.compile.after_failure import after_failure
from lightning_zero.compile.cache import AllocatorCacheLimit
from lightning_zero.compile.context import small_weight_bytes
from lightning_zero.compile.first_step import FirstStep
from lightning_zero.compile.known import (
    MASTERS,
    StepStats,
    EngineMemoryFacts,
    after_first_step,
    before_training,
    measured,
)
from lightning_zero.compile.events import CompileProgress
from lightning_zero.compile.measuring import StepProfiler
from lightning_zero.compile.graph_plan import PlanStore
from lightning_zero.compile.plan_with_margin import cautious, unless_it_may_fit
from lightning_zero.compile.planner_messages import MemoryReporter, option
from lightning_zero.compile.planner_state import PlannerState, PlanUpdate
from lightning_zero.compile.replaying import NoReplays, Replaying
from lightning_zero.compile.shares import another_fits, saved_share
from lightning_zero.compile.uncaptured_memory import Outside
from lightning_zero.config import CompileConfig, EngineConfig
from lightning_zero.config.text import format_gib
from lightning_zero.extrema import all_min
from lightning_zero.native import Executor
from lightning_zero.profiling.headroom import MemoryGauge, memory_limit

__all__ = ["MemoryPlanner"]

MEASURED_STEPS = 3
# Where every other batch has a new length, compiling may go on for long.
MOST_STEPS = 40
# Of these the last one shows what is outside of compiled code.
FORESEEN_STEPS = 2
WATCHED_STEPS = 6  # code runs a few times before it is captured; what captures hold is seen after that


class MemoryPlanner:
    """Decides for one engine.

    Args:
        progress: knows how much has been compiled, and shows lines to the user.
        plans: of the graphs that have run.
        executor: counts the bytes that are gathered.
        group: of all ranks, on the CPU.
        gauge: reads this rank's device.

    Attributes:
        known: what others than the compiler know.
        replays: what is compiled, from memory of its own; whoever knows them sets it.
        apply: is told the options, with what was chosen in their places, and all that was chosen, for what does not
            compile; likewise.
        accumulates: tells whether micro-batches have been announced whose gradients could wait; likewise.
        plan: the last one that was made; None where there is no limit, or nothing is known yet.
        first_step: holds the first step within the limit.
        cache: holds what the allocator keeps of later ones within it.
    """

    def __init__(
        self, progress: CompileProgress, plans: PlanStore, executor: Executor, group: dist.ProcessGroup, gauge: MemoryGauge
    ) -> None:
        self._telling = MemoryReporter(progress.report, group)
        self._plans = plans
        self._group = group
        self._gauge = gauge
        self._measuring = StepProfiler(progress, plans, executor, gauge)
        self.cache = AllocatorCacheLimit(gauge, progress.report)
        self.known = EngineMemoryFacts()
        self.replays: Replaying = NoReplays()
        self.apply: Callable[[EngineConfig, MemoryConfig], None] = lambda config, chosen: None
        self.accumulates: Callable[[], bool] = lambda: False
        self.plan: MemoryPlan | None = None
        self._now: MemoryConfig | None = None  # None: as the options say
        self._wanted = False
        self.reset()

    def reset(self, forget: bool = False) -> None:
        """Measures again; for other options, with which everything is compiled again anyway. Memory that is laid out
        for weights until the step stays, unless it is to be forgotten, too."""
        laid_out = self._now is not None and self._now.until == "step" and self._now.weights > 0
        done = laid_out and self.plan is None and not forget
        if not done:
            self._now = self.plan = None
        self._course = PlannerState(done)
        self.first_step = FirstStep(self._gauge)
        self._measuring.reset()

    def until_step(self, config: CompileConfig) -> float:
        """Bytes of weights that stay until the optimizer steps, as far as that is known."""
        if self._now is not None and self._now.until == "step":
            return self._now.weights
        return config.unsharded_cache_bytes if config.unsharded_cache_until == "step" else 0.0

    def settled(self) -> bool:
        """Whether nothing is going to be compiled again for a budget."""
        return self._course.done or not self._wanted

    def may_capture(self) -> bool:
        """Whether what is compiled now is what stays, and its replays would be within the limit, if there is one."""
        return self.settled() and (not self._course.watching or self._course.foreseen)

    def charts(self, config: EngineConfig) -> bool:
        """Whether graphs that are compiled now should say what other budgets of activations come to: another plan will
        be made, which may choose one. Of what is on the host by hand nobody reckons."""
        awaited = config.memory is not None and self._gauge.reports_memory and not self._course.done
        return awaited and constraints_of(config).activations and ACTIVATIONS not in self.now(config).offload

    def now(self, config: EngineConfig) -> MemoryConfig:
        """How memory is spent."""
        return self._now or memory_config(config, self.known.away)

    @property
    def outside(self) -> Outside:
        """Has to see all calls of what is compiled."""
        return self._measuring.outside

    @property
    def has_begun(self) -> bool:
        """Whether anything has been measured, so that other code would need :meth:`reset`."""
        return self.first_step.before is not None or self._course.done or self._measuring.steps > 0

    def give_back(self) -> None:
        """What the allocator keeps, and no tensor lies in."""
        self._gauge.empty()

    # -- what an engine tells

    def optimizer_steps(self) -> None:
        """Must come with each step of an optimizer; harmless when repeated."""
        self._measuring.optimizer_steps()
        self.first_step.optimizer_steps()

    def backward_begins(self) -> None:
        """Should come where a forward is over: what is there then has been saved."""
        self.first_step.backward_begins()
        # Once all is decided nobody asks, and reading a device in each backward would take time for ever.
        if (self.plan is not None or self._course.looked) and not self.settled():
            self._measuring.backward_begins()

    def before_training(self, config: EngineConfig, known: EngineMemoryFacts) -> PlanUpdate | None:
        """Optimizers are known, and nothing has been trained yet: what cannot wait is decided. Harmless when repeated.
        Collective, where there is a limit."""
        if config.memory is None:
            self.known = known.in_training()
            return None
        host, link = self._least(known.host or 0.0, known.host_bytes_per_s or 0.0)
        known = replace(known, host=host or None, host_bytes_per_s=link or None)
        self.known = known.in_training()
        if self.first_step.before is not None or (not self._gauge.reports_memory and config.memory == "auto"):
            return None
        now, memory = memory_config(config, known.away), self._gauge.read() if self._gauge.reports_memory else None
        facts = before_training(known, config, memory, now)
        (room,) = self._least(facts.limit - facts.peak)
        facts = replace(facts, peak=facts.limit - room)
        free, later = constraints_of(config, known.may_leave), (ACTIVATIONS, WEIGHTS)
        self.plan = plan = with_offload_advice(choose_plan(facts, free, later), facts, free, known.before, later)
        if MASTERS in plan.chosen.offload:
            self.known = replace(self.known, before=())
        if not self._gauge.reports_memory or plan.chosen != now or not plan.fits:
            self._show(config)
        self._now = plan.chosen
        return PlanUpdate(plan.chosen)

    def gradients_apart(self) -> PlanUpdate | None:
        """They lie over copies of weights by no later plan; what holds instead of one that had them lie there."""
        self.known = known = self.known.in_place()
        self._course.facts = self._course.facts and replace(self._course.facts, gradients=known.gradients)
        if self._now is None or not self._now.over_copies:
            return None
        self._now = replace(self._now, over_copies=False)
        self.plan = self.plan and replace(self.plan, chosen=self._now)
        return PlanUpdate(self._now)

    def decided(self, config: EngineConfig) -> PlanUpdate | None:
        """What holds from now on; None for what held before. Must come before each pass forward and backward.
        Collective, if an optimizer has stepped since the last time, and before the second pass."""
        auto = config.compile and config.unsharded_cache_mb == "auto"
        self._wanted = config.memory is not None or auto
        self.outside.of_each = config.memory is not None and self.replays.enabled and self._gauge.reports_memory
        if self.settled() and not self._course.watching:
            return None
        if not self._gauge.reports_memory:
            self._course.done = True
            self._telling.no_device(config, auto)
            return None
        self._measuring.compiles = config.compile
        self._measuring.captures = self.outside.of_each and not self._course.foreseen
        early = None if self._course.looked or config.memory is None else self._look(config)
        stepped = self._measuring.pass_begins()
        if early is not None or not stepped:
            return early
        quiet = self._agreed(config)
        if self._course.watching:
            return self._watch(config, quiet)
        if quiet.steps < MEASURED_STEPS and self._measuring.steps < MOST_STEPS:
            return None
        self._course.done = True
        if quiet.steps < MEASURED_STEPS:
            self._telling.never_quiet(config, MOST_STEPS, MEASURED_STEPS)
            return None
        return self._decide(config, quiet)

    # -- deciding

    def _look(self, config: EngineConfig) -> PlanUpdate | None:
        """Before the first pass and before the second: what would not fit once it is compiled is planned away."""
        if self.first_step.before is None:
            self.first_step.begin(config.memory)
            return None
        self._course.looked = True
        shown, now = self.first_step.end(), self.now(config)
        limit = memory_limit(config.memory, shown.memory.total)
        facts = after_first_step(self.known, limit, shown, now)
        (most,) = self._least(limit - shown.memory.taken)
        self._course.first_peak = int(limit - most)
        if shown.left:
            self._telling.report(
                f"{option(config)}: {format_gib(shown.left)} GiB of what the first step, which ran eagerly, saved for its "
                "backward were on the host meanwhile."
            )
        room, saved, pass_s = self._least(facts.limit - facts.peak, -facts.activations, -facts.speed.pass_s)
        speed = replace(facts.speed, pass_s=-pass_s)
        facts = replace(facts, peak=facts.limit - room, activations=-saved, speed=speed)
        # How many activations can leave is seen only once it is measured how long a pass takes.
        free = unless_it_may_fit(constraints_of(config, {*self.known.may_leave} - {ACTIVATIONS}), facts)
        plan = self._decided(facts, free, later=(WEIGHTS,))
        if plan.chosen == now and plan.fits:
            return None
        self.plan, self._now = plan, plan.chosen
        self._show(config)
        return PlanUpdate(plan.chosen)

    def _decided(self, facts: PlannerInputs, free: Constraints, later: Sequence[str] = ()) -> MemoryPlan:
        return replace(cautious(facts, free, self.known.before, later), first_step=self._course.first_peak)

    def _agreed(self, config: EngineConfig) -> StepStats:
        limit = partial(memory_limit, config.memory)
        own = StepStats.own(self._measuring.quiet, self._plans, self._measuring.pass_s(), limit)
        return own.of_all(self._least)

    def _decide(self, config: EngineConfig, quiet: StepStats) -> PlanUpdate | None:
        memory, now = self._measuring.quiet.memory, self.now(config)
        assert memory is not None
        limited, until_step = config.memory is not None, now.until == "step"
        known = self.known if self.accumulates() else self.known.reduced_at_once()
        facts = measured(known, memory_limit(config.memory, memory.total), quiet, limited and self.replays.enabled, now)
        if not limited:  # a budget for weights alone, however many these are
            weights = max(quiet.room, 0.0) if until_step else quiet.traffic / 2
            facts = replace(facts, weights=weights, speed=replace(facts.speed, passes=1.0))
        if limited:
            self._course.facts, self._course.traffic, self._course.room = facts, quiet.traffic, quiet.room
            return self._spend(facts, config, quiet.traffic)
        plan = choose_plan(facts, constraints_of(config, self.known.may_leave))
        fits, share = self._another_fits(plan.chosen, quiet.traffic, config), self._share(plan.chosen, quiet.traffic)
        self._telling.budget(memory, quiet.room, now.until, fits)
        self._now = plan.chosen if fits else None
        return PlanUpdate(plan.chosen, share) if fits else None

    def _spend(self, facts: PlannerInputs, config: EngineConfig, traffic: float) -> PlanUpdate | None:
        """Within a limit, by what was measured."""
        free, now = constraints_of(config, self.known.may_leave), self.now(config)
        plan = self._decided(facts, free)
        fits = self._another_fits(plan.chosen, traffic, config)
        if not fits and facts.now.weights == 0:
            plan = self._decided(facts, free, later=(WEIGHTS,))
        self.plan, self._now = plan, plan.chosen
        self._show(config)
        self._course.watching, self._course.emptied = True, False
        self._course.foreseen = not self.replays.enabled or (plan.fits and plan.chosen == now)
        self._measuring.again()
        again = fits or (plan.chosen.activation_memory_budget, plan.chosen.weights) != (
            now.activation_memory_budget,
            now.weights,
        )
        if plan.chosen == now:
            return None
        return PlanUpdate(plan.chosen, self._share(plan.chosen, traffic) if again else None)

    @staticmethod
    def _share(chosen: MemoryConfig, traffic: float) -> float:
        return saved_share(chosen.weights, traffic) if chosen.until == "backward" else 0.0

    def _another_fits(self, chosen: MemoryConfig, traffic: float, config: EngineConfig) -> bool:
        until_step = chosen.until == "step"
        share = self._share(chosen, traffic)
        small_bytes = small_weight_bytes(config.compiled)
        fits = another_fits(self._plans.agreed_plans, share, chosen.weights if until_step else 0.0, small_bytes)
        # Ranks have agreed on these plans; should one hold others all the same, it does what the rest do.
        return self._least(-fits)[0] < 0

    def _watch(self, config: EngineConfig, quiet: StepStats) -> PlanUpdate | None:
        """Whether what was planned is held; once, what holds instead."""
        if not self._course.foreseen:
            return self._foresee(config, quiet)
        if quiet.steps < WATCHED_STEPS and self._measuring.steps < MOST_STEPS:
            return None
        self._course.watching = False
        if self.plan is None or not quiet.steps:
            return None
        memory = self._measuring.quiet.memory
        assert memory is not None
        limit = memory_limit(config.memory, memory.total)
        if quiet.room < 0 and not self._course.emptied:
            # Code that ran before it was captured has left memory with the allocator that graphs cannot use.
            self._course.emptied = self._course.watching = True
            self._measuring.again()
            return None
        self.plan = plan = replace(self.plan, measured=int(limit - quiet.room))
        self._telling.report(
            f"{option(config)}: the peak is {format_gib(plan.steady)} GiB, of {format_gib(limit)}; {format_gib(plan.peak)} were expected."
        )
        if quiet.room >= 0:
            return None
        if (other := self._another(config, plan.steady)) is not None:
            return self._spend(other, config, self._course.traffic)
        if self._course.room >= 0 and self._declines(config, -quiet.room):
            self._course.watching = True
            return None
        if self._course.facts is not None:
            facts, free = self._course.facts, constraints_of(config, self.known.may_leave)
            facts = with_measured_peak(facts, plan.chosen, plan.steady)
            self.plan = plan = with_offload_advice(plan, facts, free, self.known.before)
        self._telling.warn(f"{option(config)} is not held: {format_gib(-quiet.room)} GiB more are taken. {plan.instead()}")
        return None

    def _foresee(self, config: EngineConfig, quiet: StepStats) -> PlanUpdate | None:
        """Before anything is captured: whether replays would pass the limit; what holds instead."""
        looked = quiet.steps >= FORESEEN_STEPS
        if not looked and self._measuring.steps < MOST_STEPS:
            return None
        self._course.foreseen = True
        if not looked:
            return None
        self._course.room = quiet.room
        if quiet.replayed < 0 and self.plan is not None:
            if (other := self._another(config, self.plan.limit - quiet.replayed)) is not None:
                return self._spend(other, config, self._course.traffic)
            if quiet.room >= 0:
                self._declines(config, -quiet.replayed)
        return None

    def _another(self, config: EngineConfig, peak: float) -> PlannerInputs | None:
        """What is known with this plan's peak, if another plan would come of it. Once."""
        if self._course.replanned or self._course.facts is None or self.plan is None:
            return None
        self._course.replanned = True
        self._course.facts = facts = with_measured_peak(self._course.facts, self.plan.chosen, peak)
        same = choose_plan(facts, constraints_of(config, self.known.may_leave)).chosen == self.plan.chosen
        return None if same else facts

    def _declines(self, config: EngineConfig, missing: float) -> bool:
        """Whether nothing is replayed any more, so that the limit is held."""
        declined = self.replays.disable(f"that would take {format_gib(missing)} GiB more than {option(config)}")
        if declined:
            self._measuring.again()
        return declined

    def next_plan(self, config: EngineConfig, requested: int) -> MemoryPlan | None:
        """After this rank's device had no memory for so many bytes: what would fit, by this rank's numbers alone. None
        where the device does not tell."""
        if not self._gauge.reports_memory:
            return None
        stepped = self._measuring.stepped or self._measuring.steps > 0
        return after_failure(self.known, config, self._gauge.read(), self.now(config), stepped, requested)

    def _show(self, config: EngineConfig) -> None:
        assert self.plan is not None
        self._course.told_first |= self._telling.plan(self.plan, config, self._course.told_first)

    def _least(self, *values: float) -> list[float]:
        """Of all ranks."""
        return all_min(torch.tensor(values, dtype=torch.float64), self._group).tolist()
