"""Compilation for one engine, and the calls that each training step makes to it.

:class:`CompileSession` owns the compiler, the compiled modules, the plans and the memory planner. Call ``begin()``,
then ``attach(module)`` once the module is sharded. In each training step call ``next_pass()`` first, run forward inside
``step()``, and call ``planner.optimizer_steps()`` with each optimizer step. :class:`CompiledStepHooks` does so for the
step cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from lightning_zero.compat.patches import require_compiler
from lightning_zero.compile.backend import Compiler
from lightning_zero.compile.capture.discovery import CompiledModules
from lightning_zero.compile.capture.eager_weights import regather_saved_weights
from lightning_zero.compile.consensus import RankConsensus
from lightning_zero.compile.context import PassContext, small_weight_bytes
from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.events import CompileProgress
from lightning_zero.compile.fp8 import check_fp8_device
from lightning_zero.compile.graph_plan import GraphPlan, PlanStore
from lightning_zero.compile.passes import PassSpec, default_passes
from lightning_zero.compile.passes.selection import PassSelection
from lightning_zero.config import CompileConfig, EngineConfig
from lightning_zero.config.text import format_bytes
from lightning_zero.memory_planner.inputs import apply_memory_config, memory_config
from lightning_zero.memory_planner.planner import CompilerAccess, MemoryPlanner, PlanUpdate
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.offload.activations import HostActivations
from lightning_zero.offload.saved_tensors import SavedTensorOffload
from lightning_zero.offload.staging_ring import FRACTION_WITH_COMPUTE, measure_host_bandwidth
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel, measure_costs
from lightning_zero.profiling.device_gauges import MemoryGauge
from lightning_zero.sharding.fp8_health import Fp8Health
from lightning_zero.sharding.fp8_shards import Fp8Shards, uses_fp8_shards
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.symm_mem import PeerTransports
from lightning_zero.task_progress import TaskProgress


class CompileSession:
    """Compile the modules of one engine, and recompile them when options change.

    Args:
        transports: of weights and gradients, which change how graphs are rewritten.
        report: logs a line for the user; called on every rank.
        tasks: shows the user how long compilations take.

    Attributes:
        plans: plans of the graphs that have run.
        compiled_modules: compiled modules; None before :meth:`attach`.
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
        tasks: TaskProgress | None = None,
    ) -> None:
        self.config = config
        self._mesh = mesh
        self._watchdog = watchdog
        self._transports = transports
        # torch keeps compilers, and with them the consensus, which must not keep the executor.
        weak = weakref.ref(executor)
        self._consensus = RankConsensus(
            mesh.store("lightning_zero"),
            mesh.rank,
            mesh.world_size,
            config.tuning.consensus_timeout_s,
            mesh.timeout_s,
            check=watchdog.check,
            needed=lambda: (alive := weak()) is None or not alive.weights.uses_epoch_lock(),
        )
        self._selection = PassSelection()
        self._cuda_graphs: CUDAGraphManager | None = None
        self._costs: CostModel | None = None
        activations = HostActivations(mesh.device)
        executor.keep_activations(activations)
        self.progress = CompileProgress(self._consensus.compiling, watchdog.native.busy, report, tasks)
        report = self.progress.report
        self._make_compiled_modules = partial(
            CompiledModules, skip=skip_modules, report=report, quota=activations.quota, tasks=self.progress.tasks
        )
        self.plans = PlanStore()
        compiler = CompilerAccess(
            compiled=lambda: self.compiled,
            gathered=lambda: executor.counters().get("gather_bytes", 0),
            forward_s=self.plans.forward_seconds,
            keeps_more=lambda share, budget: self.plans.keeps_more(
                share, budget, small_weight_bytes(self.config.compiled)
            ),
            captures=lambda: self._cuda_graphs is not None and self._cuda_graphs.enabled,
            disable_captures=lambda reason: self._cuda_graphs is not None and self._cuda_graphs.disable(reason),
        )
        self.planner = MemoryPlanner(report, compiler, mesh.control_group, MemoryGauge(mesh.device))
        self.compiled_modules: CompiledModules | None = None

    @property
    def compiled(self) -> int:
        """Return a count that changes whenever other code may run."""
        return self.progress.compiled + self.plans.count

    def begin(self, cuda_graphs: CUDAGraphManager) -> None:
        """Create the compiler, whose graphs are wrapped. Collective if the options need measured bandwidths."""
        self._cuda_graphs = cuda_graphs
        self._check_device(self.config)
        self._new_compiler(self.config.compiled)

    def check(self, config: EngineConfig) -> None:
        """Raise ``ValueError`` if a disabled pass is required with these options, or another device."""
        self._check_device(config)
        self._selection.check(default_passes(self._context(config.compiled)))

    def _check_device(self, config: EngineConfig) -> None:
        if config.linear_dtype == "fp8":
            check_fp8_device(self._mesh.device)

    def configure(self, config: EngineConfig) -> None:
        """Set new options between steps; call :meth:`check` before.

        Changed compile options restart everything: the next step runs eagerly and discovers modules. Otherwise a memory
        plan stays in force, and parts that do not compile receive its options.
        """
        before, self.config = self.config, config
        try:
            self._apply_changes(before, config)
        except BaseException:
            self.config = before  # so that a retry applies all changes
            raise

    def _apply_changes(self, before: EngineConfig, config: EngineConfig) -> None:
        self._consensus.patience_s = config.tuning.consensus_timeout_s
        if config.memory != before.memory or _unsharded_cache_options(config) != _unsharded_cache_options(before):
            self.planner.reset(forget=True)
        planned = config.memory is not None and _memory_options(config) != _memory_options(before)
        if config.compiled != before.compiled or config.memory != before.memory or planned:
            self._restart()
        if config.memory is not None:
            self.apply_update(PlanUpdate(self.planner.current(config)))
        else:
            self.planner.apply(config, memory_config(config))

    def remeasure_links(self) -> None:
        """Measure again and restart after weights or gradients changed their transport.

        Decisions made before training stay in force, since their memory is already on the host.
        """
        self._costs = None
        self._restart(reset=self.planner.has_begun)

    def _restart(self, reset: bool = True) -> None:
        if reset:
            self.planner.reset()
        self._new_compiler(self.config.compiled)
        if self.compiled_modules is not None:
            self.compiled_modules = self.compiled_modules.restart(self._arguments)

    def _new_compiler(self, compile: CompileConfig) -> None:
        """Create the compiler. Its arguments for torch.compile change only here and in :meth:`_compile_again`."""
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
        self._compiler = Compiler(context, self._selection, self.plans, self.progress, self._cuda_graphs.wrap)
        self._arguments = self._compiler.arguments()

    def _context(self, config: CompileConfig) -> PassContext:
        return PassContext(
            config,
            self._mesh.shard_group.size,
            self.costs_or_nominal,
            zero_copy_gradients=self._transports.zero_copy_gradients,
            fp8_shards=self.uses_fp8_shards,
            compute_dtype=self.config.compute_dtype,
        )

    @property
    def uses_fp8_shards(self) -> bool:
        """Return True if compiled code gathers weights in fp8."""
        return uses_fp8_shards(self.config, self._mesh)

    def _compile_again(self, saved_share: float | None = None) -> None:
        """Recompile the same modules with other passes or another share of saved weights.

        Free CUDA graphs first.
        """
        assert self._cuda_graphs is not None
        self._cuda_graphs.drop()
        self.planner.empty_cache()  # only a graph could use this memory
        self._arguments = self._compiler.arguments(saved_share)
        if self.compiled_modules is not None:
            self.compiled_modules.compile_again(self._arguments)

    @property
    def costs(self) -> CostModel | None:
        """Return measured costs of device and links, equal on all ranks; None if nothing was measured."""
        return None if self._costs is None or self._costs.are_nominal else self._costs

    @property
    def costs_or_nominal(self) -> CostModel:
        return self._costs or NOMINAL_COSTS

    # -- passes

    @property
    def known_passes(self) -> dict[str, PassSpec]:
        """Return all available passes by name."""
        return self._selection.known(self._compiler.default())

    def register_pass(self, spec: PassSpec) -> None:
        """Register a user pass for :meth:`use_passes`."""
        self._selection.register(spec, self._compiler.default())

    def use_passes(self, names: Sequence[str] | None) -> bool:
        """Set the passes of graphs from now on. Call it with equal names on all ranks.

        Args:
            names: names of passes in order; None for the default ones.

        Returns:
            True if the passes changed, so that everything is compiled again.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph incomplete.
        """
        return self._recompile_if(self._selection.use(names, self._compiler.default()))

    def disable_passes(self, names: Sequence[str]) -> bool:
        """Disable these passes and enable all others. Call it with equal names on all ranks.

        Returns:
            True if the passes changed, so that everything is compiled again.
        """
        return self._recompile_if(self._selection.disable(names, self._compiler.default()))

    def _recompile_if(self, changed: bool) -> bool:
        if changed:
            self._compile_again()
        return changed

    # -- what an engine tells

    def attach(self, module: nn.Module) -> None:
        """Compile calls of the sharded ``module``, or of modules in it, after a step has discovered them."""
        self.compiled_modules = self._make_compiled_modules(module, self._arguments)

    def next_pass(self) -> float:
        """Apply a new memory plan if there is one. Call it before each forward and backward pass.

        Collective if an optimizer has stepped since the last call and the planner is not settled.

        Returns:
            Bytes of unsharded weights that are kept until the optimizer step.
        """
        update = self.planner.update(self.config)
        if update is not None:
            self.apply_update(update)
        return self.planner.step_cache_bytes(self.config.compiled)

    def apply_update(self, update: PlanUpdate) -> None:
        """Apply the decision of a memory plan."""
        config, before = apply_memory_config(self.config, update.chosen), self._compiler
        self.planner.apply(config, update.chosen)
        if config.compiled != before.context().config:
            self._new_compiler(config.compiled)
            self._compiler.last_weight, self._compiler.call_info = before.last_weight, before.call_info
            self._compile_again(update.share)
        elif update.share is not None:
            self._compile_again(update.share)

    @property
    def is_discovering(self) -> bool:
        """Return True if the next step runs eagerly to discover modules."""
        assert self.compiled_modules is not None
        return self.config.compiled.enabled and not (
            self.compiled_modules.modules or self.compiled_modules.eager_reasons
        )

    def step(self) -> AbstractContextManager[None]:
        """Return a context for the forward of a training step."""
        assert self.compiled_modules is not None
        return self.compiled_modules.step(self.is_discovering)

    def explain_errors(self) -> AbstractContextManager[None]:
        """Return a context for each backward; see :meth:`CompiledModules.explain_errors`."""
        assert self.compiled_modules is not None
        return self.compiled_modules.explain_errors()

    def set_last_read(self, last_read: Tensor | None) -> None:
        """Set the shard that forward reads last, for graphs compiled from now on."""
        assert self.compiled_modules is not None
        self._compiler.last_weight, self._compiler.call_info = last_read, self.compiled_modules.call_info

    def check_plan(self, digest: str, text: str) -> None:
        """Check a graph's plan with the other ranks before the graph runs for the first time."""
        plan = GraphPlan.from_json(text)
        with self._watchdog.waiting("the agreement on a newly compiled graph"):
            self._consensus.check(digest, plan.collectives())
        self.plans.add(plan)


def _unsharded_cache_options(config: EngineConfig) -> tuple[object, ...]:
    return config.unsharded_cache_mb, config.unsharded_cache_until


def _memory_options(config: EngineConfig) -> tuple[object, ...]:
    """Return options of host memory and gradients that a plan depends on but compilation does not."""
    return config.offload, config.tuning.offload_buffer_mb, config.stage, config.tuning.grad_aliasing


class CompiledStepHooks:
    """The :class:`~lightning_zero.step.cycle.CompiledPart` of one engine."""

    def __init__(
        self, session: CompileSession, cuda_graphs: CUDAGraphManager, sharder: Sharder, transports: PeerTransports
    ) -> None:
        self.session = session
        self._planner, self._cache = session.planner, session.planner.cache
        self._executor = sharder.executor
        self._cuda_graphs = cuda_graphs
        self.sharder = sharder
        self.transports = transports
        self._fp8_shards: Fp8Shards | None = None  # set once they are used
        self.fp8_health: Fp8Health | None = None  # with the option, from the first forward
        self._eager_reads = -1  # in the last step; -1 if unknown
        self._reported_hooks = False
        self._reported_limit: float | None = None  # MiB of activations of the last warning

    def allocate(self) -> None:
        """Allocate memory that other ranks access. Collective at the first call."""
        self.sharder.memory.finalize_layout()
        if self.sharder.memory.allocate_transport_memory(self.session.uses_fp8_shards):
            self.remeasure_links()

    def remeasure_links(self) -> None:
        """Measure again after weights or gradients changed their transport. Collective."""
        reason = self.transports.no_capture_reason(self._executor)
        self._cuda_graphs.configure(self.session.config, reason)
        self.session.remeasure_links()

    def on_gradients_moved(self) -> None:
        """Drop captures, which contain the gradients' former addresses."""
        self._cuda_graphs.drop()

    def prepare(self) -> None:
        """Prepare a forward of a training step. Collective."""
        config = self.session.config
        self._executor.activations.wait_all()
        self._check_offloaded(config.tuning.offload_activations_mb)
        if config.compiled.enabled:
            if (fp8_shards := self._find_fp8_shards()) is not None and fp8_shards.before_forward():
                self._cuda_graphs.drop()  # they cast master shards
            self._executor.weights.refresh_compute_shards()
            if (fp8_health := self._find_fp8_health()) is not None and fp8_health.before_forward():
                self._cuda_graphs.drop()
        used = config.compute_dtype if config.compiled.enabled else None  # eager code casts after it reads
        kept = self.session.next_pass()
        self.sharder.memory.cache_unsharded(used, small_weight_bytes(config.compiled), kept)
        if not self._first_pass:
            self._cache.forward_begins(self.session.config.memory, self.session.compiled)

    def _find_fp8_shards(self) -> Fp8Shards | None:
        """Return the shards that are gathered in fp8; None if the options have always excluded them.

        They also allocate compute shards, which later graphs without fp8 read.
        """
        dtype = self.session.config.compute_dtype
        if self._fp8_shards is None and dtype is not None and self.session.uses_fp8_shards:
            memory, symm_mem = self.sharder.memory, self.transports.weight_memory
            self._fp8_shards = Fp8Shards(
                self._executor, self.sharder.mesh, dtype, self.sharder.records, memory, symm_mem
            )
        return self._fp8_shards

    def _find_fp8_health(self) -> Fp8Health | None:
        """Return the health of fp8 matrices; None if the options do not ask for it."""
        config = self.session.config
        every = config.tuning.fp8_health_every if config.linear_dtype == "fp8" else None
        if every is None:
            self.fp8_health = None
        elif self.fp8_health is None:
            self.fp8_health = Fp8Health(self._executor, self.sharder.records, every)
        else:
            self.fp8_health.every = every
        return self.fp8_health

    def begin_stage(self) -> None:
        """Call when a training or an evaluation begins."""
        if self._fp8_shards is not None:
            self._fp8_shards.begin_stage()

    def end_step(self, forward_follows: bool) -> None:
        """Call after an optimizer has stepped, before other ranks may read the shards. Collective.

        ``forward_follows``: the training step goes on.
        """
        if self._fp8_shards is not None:
            self._fp8_shards.after_step(forward_follows)
        if self.fp8_health is not None:
            self.fp8_health.after_step()

    def before_evaluation(self) -> None:
        """Call before each evaluation forward."""
        if self._fp8_shards is not None:
            self._fp8_shards.before_evaluation()

    def before_overwriting(self) -> None:
        """Call before other values are written to the weights, which may fail halfway."""
        if self._fp8_shards is not None:
            self._fp8_shards.expire()

    def after_overwriting(self) -> None:
        """Call after all ranks have written other values to the weights. Collective."""
        if self._fp8_shards is not None:
            self._fp8_shards.refresh()

    @property
    def _first_pass(self) -> bool:
        """Return True in the first pass, whose statistics also manage the allocator's cache."""
        return self._planner.first_step.saves is not None

    def _check_offloaded(self, megabytes: float | None) -> None:
        """Warn if the last pass offloaded more than the limit; ``offload/activations.py`` lists the reasons."""
        quota = self._executor.activations.quota
        sent, beyond = quota.sent / 2**20, quota.exceeded_by
        quota.begin_pass(float("inf") if megabytes is None else megabytes * 2**20)
        if megabytes is None or not beyond or megabytes == self._reported_limit:
            return
        self._reported_limit = megabytes
        self.session.progress.report(
            f"offload_activations_mb={megabytes:g} is exceeded: the last pass offloaded {sent:.3g} MiB, and exceeded "
            f"it in {beyond}, where a graph ran more than once in a call, or for modules that differ, or in a call "
            "that the first step did not have, or with a larger batch than it was compiled for. To stay near this "
            f"limit, pass {megabytes * megabytes / sent:.3g}."
        )

    @contextmanager
    def surround(self) -> Iterator[None]:
        """Return a context for each forward of a training step.

        The first step runs eagerly to discover modules.
        """
        first, (eager, gathers) = self.session.is_discovering, self._count_reads()
        saves = self._first_saves() if first else None
        with ExitStack() as stack:
            stack.enter_context(self.session.step())
            # Saved-tensor hooks cost a call per saved tensor, and are unnecessary if compiled code reads all weights.
            if first or self._eager_reads != 0:
                stack.enter_context(regather_saved_weights(self.sharder, saves))
            stack.callback(setattr, self._cuda_graphs, "in_step", False)
            self._cuda_graphs.in_step = True
            stack.callback(self._executor.weights.serve_eager_from_cache, False)
            self._executor.weights.serve_eager_from_cache(True)
            yield
        if first:
            self.session.set_last_read(self.sharder.reader.last_read)
            self._report_offloaded(saves)
        eager_now, gathers_now = self._count_reads()
        if gathers_now != gathers:  # a step without forward on this rank says nothing about the next one
            self._eager_reads = eager_now - eager

    def _first_saves(self) -> SavedTensorOffload | None:
        first = self._planner.first_step
        return first.saves if self._first_pass else first.unmeasured_saves(self.session.config.memory)

    def _report_offloaded(self, saves: SavedTensorOffload | None) -> None:
        """Report what an eager forward offloaded; the planner reports its own measurement."""
        if saves is not None and saves.nbytes and not self._first_pass:
            self.session.progress.report(
                f"Offloaded {format_bytes(saves.nbytes)} of activations of this eager step, because the device had "
                "too little memory. Compiled steps save less."
            )

    def stepped(self) -> None:
        """Call when an optimizer steps. Idempotent."""
        self._planner.optimizer_steps()
        if not self._first_pass:
            self._cache.optimizer_steps(self.session.config.memory, self.session.compiled)

    def set_hooked_parameters(self, hooked: Collection[ShardedParameter], forward_ran: bool) -> None:
        """Exclude code that computes these parameters' gradients from CUDA graphs.

        Parameters that get their first hook after a forward stay excluded: the next hook would miss a replayed forward.
        """
        self._cuda_graphs.set_hooked_parameters({id(record.param) for record in hooked}, forward_ran)
        if not hooked or self._reported_hooks:
            return
        self._reported_hooks = True
        names = [repr(record.name) for record in hooked]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        replayed = (
            "; compiled code that reads these is not replayed as a CUDA graph" if self._cuda_graphs.enabled else ""
        )
        self.session.progress.report(
            f"Gradient hooks (register_hook): they run on unsharded gradients before these are reduced{replayed}. "
            f"(parameters={', '.join(names[:4])}{more})"
        )

    def backward_begins(self) -> None:
        """Call between a forward and its backward."""
        self._planner.backward_begins()
        if not self._first_pass:
            self._cache.phase_begins(self.session.config.memory, self.session.compiled)

    def release_memory(self) -> None:
        """Free CUDA graphs before code other than a training step if little memory is left."""
        self._cuda_graphs.release_memory()
        self._cache.evaluates(self.session.config.memory, self.session.compiled)

    def reset(self) -> None:
        """Drop captures and unfinished work, and report the last steps."""
        if self.fp8_health is not None:
            self.fp8_health.finish()
        self._cuda_graphs.drop()
        self._executor.activations.reset()
        self._eager_reads = -1

    def _count_reads(self) -> tuple[int, int]:
        counters = self._executor.counters()
        return counters.get("eager_gathers", 0), counters.get("gathers", 0)
