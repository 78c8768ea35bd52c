"""Everything about compiling for one engine: what is compiled, by which compiler, whether the ranks compile the same,
and when all of it is compiled again.

Protocol: ``session = CompileSession(...)``; ``session.begin(replays)``; ``session.attach(module)`` once the module is
sharded. In each training step, ``session.next_pass()`` comes before anything that depends on what is compiled, and
``with session.step():`` surrounds the forward. ``session.budget.optimizer_steps()`` comes with each step of an
optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_zero.budget.options import apply_memory_config, memory_config
from lightning_zero.compat.patches import require_compiler
from lightning_zero.compile.backend import Compiler
from lightning_zero.compile.budget import MemoryPlanner
from lightning_zero.compile.consensus import RankConsensus
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.discover import CompiledModules
from lightning_zero.compile.listener import CompileProgress
from lightning_zero.compile.passes import PassSpec, default_passes
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.plan_book import PlanStore
from lightning_zero.compile.planner_state import PlanUpdate
from lightning_zero.compile.selection import PassSelection
from lightning_zero.config import CompileConfig, EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.offload.activations import HostActivations
from lightning_zero.offload.staging_ring import FRACTION_WITH_COMPUTE, measure_host_bandwidth
from lightning_zero.profiling.estimate import NOMINAL_COSTS, CostModel, measure_costs
from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.sharding.symm_mem import PeerTransports

__all__ = ["CompileSession"]


class CompileSession:
    """Compiles for one engine.

    Args:
        config: the engine's options.
        mesh: the ranks that must compile the same.
        executor: of the engine; counts what is gathered.
        watchdog: is told what this rank waits for.
        peers: how weights and gradients travel, as far as that decides how graphs are rewritten.
        skip_modules: module types that are never compiled.
        report: shows a line to the user; called on every rank.

    Attributes:
        config: the options in force.
        progress: has observers, and shows lines to the user.
        plans: of the graphs that have run.
        budget: of weights that stay, where it is measured.
        calls: the modules that are compiled; None before :meth:`attach`.
    """

    def __init__(
        self,
        config: EngineConfig,
        mesh: Mesh,
        executor: Executor,
        watchdog: Watchdog,
        transports: PeerTransports,
        skip_modules: tuple[type, ...] = (),
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self._mesh = mesh
        self._watchdog = watchdog
        self._transports = transports
        self._consensus = RankConsensus(
            mesh.store("lightning_zero"),
            mesh.rank,
            mesh.world_size,
            config.tuning.consensus_timeout_s,
            mesh.timeout_s,
            check=watchdog.check,
        )
        # Torch keeps compilers, and with them the agreement: it must not keep the executor.
        weak = weakref.ref(executor)
        self._consensus.needed = lambda: (held := weak()) is None or not held.weights.uses_epoch_lock()
        self._selection = PassSelection()
        self._cuda_graphs: CUDAGraphManager | None = None
        self._costs: CostModel | None = None
        activations = HostActivations(mesh.device)
        executor.keep_activations(activations)
        self.progress = CompileProgress(self._consensus.compiling, watchdog.native.busy, report)
        report = self.progress.report
        self._calls_of = partial(CompiledModules, skip=skip_modules, report=report, quota=activations.quota)
        self.plans = PlanStore()
        self.budget = MemoryPlanner(self.progress, self.plans, executor, mesh.control_group, MemoryGauge(mesh.device))
        self.compiled_modules: CompiledModules | None = None

    @property
    def compiled(self) -> int:
        """How much has been compiled so far: another number means that other code runs."""
        return self.progress.compiled + self.plans.count

    def begin(self, replays: CUDAGraphManager) -> None:
        """Makes the compiler, whose graphs ``replays`` wraps. Measures transfers, on all ranks together, where the
        options need that."""
        self._cuda_graphs = replays
        self.budget.replays = replays
        self._new_compiler(self.config.compiled)

    def check(self, config: EngineConfig) -> None:
        """Raises ``ValueError`` where passes that are switched off are needed with other options."""
        self._selection.check(default_passes(self._context(config.compiled)))

    def configure(self, config: EngineConfig) -> None:
        """Other options from now on; legal between steps. Where they are about compiling, everything begins anew: the
        next step runs eagerly and shows what to compile. Otherwise what a plan has chosen still holds, and what does
        not compile hears of the options with that alone. :meth:`check` has nothing against them.
        """
        before, self.config = self.config, config
        try:
            self._changed(before, config)
        except BaseException:
            self.config = before  # whoever tries again changes it all
            raise

    def _changed(self, before: EngineConfig, config: EngineConfig) -> None:
        self._consensus.patience_s = config.tuning.consensus_timeout_s
        if config.memory != before.memory or _staying(config) != _staying(before):
            self.budget.reset(forget=True)
        planned = config.memory is not None and _planned_away(config) != _planned_away(before)
        if config.compiled != before.compiled or config.memory != before.memory or planned:
            self._restart()
        if config.memory is not None:
            self.apply_update(PlanUpdate(self.budget.now(config)))
        else:
            self.budget.apply(config, memory_config(config))

    def remeasure_links(self) -> None:
        """Weights or gradients travel another way than was thought. Measures again, and everything begins anew; what
        was decided before training holds, since what it has put on the host is there."""
        self._costs = None
        self._restart(reset=self.budget.has_begun)

    def _restart(self, reset: bool = True) -> None:
        if reset:
            self.budget.reset()
        self._new_compiler(self.config.compiled)
        if self.compiled_modules is not None:
            self.compiled_modules = self.compiled_modules.restart(self._arguments)

    def _new_compiler(self, compile: CompileConfig) -> None:
        """Also settles the arguments for torch.compile, which come from nowhere else but :meth:`_compile_again`."""
        if compile.enabled:
            require_compiler()
        if self._costs is None and compile.enabled and compile.prefetch:
            self._costs = measure_costs(self._mesh, self._transports.weight_memory is not None)
        costs, nominal = self._costs or NOMINAL_COSTS, NOMINAL_COSTS.host_bytes_per_s
        if compile.offload_activations and costs.host_bytes_per_s == nominal:
            measured = measure_host_bandwidth(self._mesh)
            self._costs = replace(costs, host_bytes_per_s=FRACTION_WITH_COMPUTE * measured if measured else nominal)
        context = self._context(compile)
        self._selection.check(default_passes(context))
        assert self._cuda_graphs is not None
        self.plans.forget()
        wrap, outside, replays = self._cuda_graphs.wrap, self.budget.outside, weakref.ref(self._cuda_graphs)

        def static_tensors() -> Iterable[Tensor]:
            return () if (held := replays()) is None else held.static_tensors()

        def called(compiled: Callable[..., Any]) -> Callable[..., Any]:
            watched = outside.watched(compiled, static_tensors)
            return wrap(watched, watched.takes)

        self._compiler = Compiler(context, self._selection, self.plans, self.progress, called)
        self._arguments = self._compiler.arguments()

    def _context(self, config: CompileConfig) -> PassContext:
        return PassContext(
            config,
            self._mesh.shard_group.size,
            self.costs_or_nominal,
            zero_copy_gradients=self._transports.zero_copy_gradients,
        )

    def _compile_again(self, saved_share: float | None = None) -> None:
        """Compiles the same modules again, with other passes, or with another share of weights that are kept. What is
        captured of graphs that were made otherwise gives its memory back first."""
        assert self._cuda_graphs is not None
        self._cuda_graphs.drop()
        self.budget.give_back()  # nothing but a graph could use it
        self._arguments = self._compiler.arguments(saved_share)
        if self.compiled_modules is not None:
            self.compiled_modules.compile_again(self._arguments)

    @property
    def costs(self) -> CostModel | None:
        """What was measured of the device and the links, the same on every rank; None where nothing was."""
        return None if self._costs is None or self._costs.are_nominal else self._costs

    @property
    def costs_or_nominal(self) -> CostModel:
        """What passes go by."""
        return self._costs or NOMINAL_COSTS

    # -- passes

    @property
    def known_passes(self) -> dict[str, PassSpec]:
        """All passes that can be used, by name."""
        return self._selection.known(self._compiler.default())

    def register_pass(self, spec: PassSpec) -> None:
        """Makes a user's pass known, for :meth:`use_passes`.

        Raises:
            ValueError: there is a pass of that name.
        """
        self._selection.register(spec, self._compiler.default())

    def use_passes(self, names: Sequence[str] | None) -> bool:
        """Graphs go through these passes from now on, None meaning the default ones. Whether these are others, and
        everything is compiled again. The same on every rank.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph unfinished.
        """
        return self._reselected(self._selection.use(names, self._compiler.default()))

    def disable_passes(self, names: Sequence[str]) -> bool:
        """Graphs go through none of these passes from now on, whichever are chosen; what was switched off before is on
        again. Whether that changes anything, and everything is compiled again. The same on every rank.

        Raises:
            ValueError: unknown names, or passes that graphs cannot do without.
        """
        return self._reselected(self._selection.disable(names, self._compiler.default()))

    def _reselected(self, changed: bool) -> bool:
        if changed:
            self._compile_again()
        return changed

    # -- what an engine tells

    def attach(self, module: nn.Module) -> None:
        """Calls of ``module``, which is sharded, or of modules in it are compiled once a step has shown which."""
        self.compiled_modules = self._calls_of(module, self._arguments)

    def next_pass(self) -> float:
        """Must come before each pass forward and backward. Compiles once more where a measured budget says so.
        Collective, if an optimizer has stepped since the last time and the budget is not settled.

        Returns:
            Bytes of weights that stay until the optimizer steps.
        """
        decided = self.budget.decided(self.config)
        if decided is not None:
            self.apply_update(decided)
        self._compiler.sweeps_budgets = self.budget.charts(self.config)
        return self.budget.until_step(self.config.compiled)

    def apply_update(self, decided: PlanUpdate) -> None:
        """What a plan has chosen holds from now on."""
        config, before = apply_memory_config(self.config, decided.chosen), self._compiler
        self.budget.apply(config, decided.chosen)
        if config.compiled != before.context().config:
            self._new_compiler(config.compiled)
            self._compiler.last_weight, self._compiler.call_info = before.last_weight, before.call_info
            self._compile_again(decided.share)
        elif decided.share is not None:
            self._compile_again(decided.share)

    @property
    def is_discovering(self) -> bool:
        """Whether the next step runs eagerly and shows what to compile."""
        assert self.compiled_modules is not None
        return self.config.compiled.enabled and not (
            self.compiled_modules.modules or self.compiled_modules.eager_reasons
        )

    def step(self) -> AbstractContextManager[None]:
        """Surrounds the forward of each training step."""
        assert self.compiled_modules is not None
        return self.compiled_modules.step(self.is_discovering)

    def explain_errors(self) -> AbstractContextManager[None]:
        """Surrounds each backward; see :meth:`CompiledModules.explain_errors`."""
        assert self.compiled_modules is not None
        return self.compiled_modules.explain_errors()

    def set_last_read(self, last_read: Tensor | None) -> None:
        """Which shard a step's forward reads last; graphs that are compiled from now on go by it."""
        assert self.compiled_modules is not None
        self._compiler.last_weight, self._compiler.call_info = last_read, self.compiled_modules.call_info

    def check_plan(self, digest: str, text: str) -> None:
        """A graph is about to run whose plan is new to this rank.

        Raises:
            RankMismatchError: see :meth:`RankConsensus.check`.
        """
        plan = GraphPlan.from_json(text)
        with self._watchdog.waiting("the agreement on a newly compiled graph"):
            self._consensus.check(digest, plan.collectives())
        self.plans.add(plan)


def _staying(config: EngineConfig) -> tuple[object, ...]:
    """What is said by hand of weights that stay whole."""
    return config.unsharded_cache_mb, config.unsharded_cache_until


def _planned_away(config: EngineConfig) -> tuple[object, ...]:
    """What a plan goes by besides what is compiled: of the host's memory, and of gradients."""
    return config.offload, config.tuning.offload_buffer_mb, config.stage, config.tuning.grad_aliasing
