"""The engine composes the floors below: it shards a module, compiles its calls, clips, and saves. It does not know
Lightning.

Protocol: ``Engine(device)`` makes process groups and the executor; a model may be built inside
``engine.construction()``; ``engine.shard(module)`` makes its parameters shards; ``engine.train_step()`` surrounds
forward and backward, ``engine.optimizers.stepping(optimizer)`` an optimizer's step. Without these two everything still
computes the same, only eagerly and with more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.full import model_state, optimizer_state, shard_optimizer_state
from lightning_zero.compile.agreement import Agreement
from lightning_zero.compile.backend import GraphObserver
from lightning_zero.compile.budget import MeasuredBudget
from lightning_zero.compile.discover import CompiledCalls
from lightning_zero.compile.eager import regather_saved_weights
from lightning_zero.compile.passes import PassSpec, small_weight_bytes
from lightning_zero.compile.plan import Plan
from lightning_zero.compile.replay import Replays
from lightning_zero.compile.supervisor import Supervisor
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine import refuse_changes
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.profiling.estimate import NOMINAL, Costs, measure_costs
from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.sharding.buffers import BufferBroadcast
from lightning_zero.sharding.construct import sharded_construction
from lightning_zero.sharding.copying import Copies, NotCopied
from lightning_zero.sharding.full import full_parameters
from lightning_zero.sharding.peers import Peers
from lightning_zero.sharding.record import Role
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks
from lightning_zero.sharding.surgery import engine_of_class, is_sharded
from lightning_zero.sharding.unshard import make_plain
from lightning_zero.step.cycle import StepCycle
from lightning_zero.step.optimizers import OptimizerSteps

__all__ = ["Engine", "engine_of"]

_ATTRIBUTE = "_zero_engine"


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that sharded ``module``; None for a module that neither was sharded as a whole nor owns shards."""
    return module.__dict__.get(_ATTRIBUTE) or (engine_of_class(module) if is_sharded(module) else None)


class Engine(NotCopied):
    """Shards and trains one module over all ranks of a process group.

    Args:
        device: of this rank.
        config: options.
        mesh: ranks to shard over; by default all. ``torch.distributed`` must be initialised.
        skip_modules: module types that are never compiled.
        observe: sees every graph that is compiled.
        say: shows a line about the progress of compilation to the user; called on every rank.
    """

    def __init__(
        self,
        device: torch.device,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        skip_modules: tuple[type, ...] = (),
        observe: GraphObserver | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.mesh = mesh = mesh or Mesh.of(device, self.config.timeout)
        assert mesh.device == device, f"a mesh on {mesh.device} for an engine on {device}"
        self.device = device
        self.watchdog = Watchdog(mesh, self.config.tuning.report_stall_after_s)
        self.executor = Executor(
            mesh,
            self.config,
            on_backward_end=self._gradients_came,
            on_new_plan=self._new_plan,
            watchdog=self.watchdog,
        )
        self._costs: Costs | None = None
        self.peers = Peers.of(self.config, mesh)
        patience_s, check = self.config.tuning.agreement_timeout_s, self.watchdog.check
        store = mesh.store("lightning_zero")
        self._agreement = Agreement(store, self.rank, self.world_size, patience_s, mesh.timeout_s, check=check)
        self._agreement.needed = lambda: not self.executor.weights.takes_turns()
        observers = [observe] if observe is not None else []
        self._supervisor = Supervisor(self._agreement, observers, say, self.watchdog.native.busy)
        self._budget = MeasuredBudget(self._supervisor, self.executor, mesh.control_group, MemoryGauge(device))
        ready, say = self._budget.settled, self._supervisor.say
        self.replays = Replays(self.executor, device, self.config, ready, self._lasting, say, self.peers.missing)
        self._compile_arguments = self._compiler_arguments()
        self.sharder = Sharder(self.executor, mesh, self.peers)
        self.sharder.view.belongs_to(self)
        self._copies = Copies(self.sharder)
        self.module: nn.Module | None = None
        self.calls: CompiledCalls | None = None
        self._skip = skip_modules
        self.buffers = BufferBroadcast(self.executor, mesh, skip_modules)
        self.buffers.configure(self.config)
        self._hooks = StateDictHooks(self.sharder)
        self.cycle = StepCycle(self.executor, self.watchdog, self.sharder, self.buffers, _Compiled(self))
        self.optimizers = OptimizerSteps(self.sharder, mesh.reduce_group, self.cycle, self.config)

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def configure(self, config: EngineConfig) -> None:
        """Other options from now on; legal between steps.

        Raises:
            UnsupportedError: an option that was settled when the model was sharded is to be another; see
                :class:`~lightning_zero.config.option.Change`.
        """
        if config == self.config:
            return
        refuse_changes(self.config, config)
        self.peers.configure(config)
        recompile = config.compiled != self.config.compiled
        self.config = config
        self.optimizers.configure(config)
        self._agreement.patience_s = config.tuning.agreement_timeout_s
        self.executor.configure(config)
        self.replays.configure(config)
        self.buffers.configure(config)
        if recompile:
            self._compile_anew()

    def _compile_anew(self) -> None:
        self._budget.reset()
        self._compile_arguments = self._compiler_arguments()
        if self.calls is not None:
            self.calls = self.calls.anew(self._compile_arguments)

    def _compiler_arguments(self) -> dict[str, Any]:
        """Of a new compiler. Measures, on all ranks together, when it is first needed."""
        compile = self.config.compiled
        if self._costs is None and compile.enabled and compile.prefetch:
            self._costs = measure_costs(self.mesh, self.peers.for_weights is not None)
        return self._supervisor.compiler(
            compile,
            self.world_size,
            self._costs or NOMINAL,
            self.peers.for_gradients is not None,
            self.replays.wrap,
        )

    def observe(self, observer: GraphObserver) -> None:
        """``observer`` sees every graph that is compiled from now on; it must not keep graphs."""
        self._supervisor.observe(observer)

    def register_pass(self, spec: PassSpec) -> None:
        """Makes a user's pass known, for :meth:`use_passes`.

        Raises:
            ValueError: there is a pass of that name.
        """
        self._supervisor.register_pass(spec)

    def use_passes(self, names: Sequence[str] | None) -> None:
        """Graphs go through these passes from now on, None meaning the default ones; what is compiled is compiled again
        if they are others. The same on every rank.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph unfinished.
        """
        arguments = self._supervisor.use_passes(names)
        if arguments is None:
            return
        self._compile_arguments = arguments
        self.replays.drop()
        if self.calls is not None:
            self.calls.compile_again(arguments)

    @property
    def known_passes(self) -> dict[str, PassSpec]:
        """All passes that can be used, by name."""
        return self._supervisor.known_passes

    @property
    def costs(self) -> Costs | None:
        """What was measured of the device and the links, the same on every rank; None where nothing was."""
        return None if self._costs is NOMINAL else self._costs

    @property
    def plan(self) -> Plan:
        """What the compiled graphs that have run so far gather and reduce."""
        return self._supervisor.plan

    def _lasting(self) -> Iterator[Tensor]:
        module = self._sharded_module()  # what compiled graphs read that stays where it is
        return chain(module.parameters(), module.buffers(), self.sharder.memory.holds(Role.RESIDENT))

    def _new_plan(self, digest: str, text: str) -> None:
        with self.watchdog.waiting("the agreement on a newly compiled graph"):
            self._supervisor.new_plan(digest, text)

    # -- sharding

    def construction(self) -> AbstractContextManager[None]:
        """Inside, modules are sharded as they are built; see :mod:`lightning_zero.sharding.construct`. Collective."""
        return sharded_construction(self.sharder, self._hooks)

    def shard(self, module: nn.Module) -> None:
        """Makes the module's parameters shards, in place; the module, its parameters and their ties keep their
        identity. Collective.

        Raises:
            UnsupportedError: a parameter or module that cannot be sharded.
            RankMismatchError: ranks hold different models.
        """
        if engine_of(module) is not None and engine_of(module) is not self:
            raise UnsupportedError(
                "The module is already sharded by another engine. Call lightning_zero.unshard(module) first."
            )
        self.sharder.finish(module)
        self.module = module
        self.buffers.watch(module)
        module.__dict__[_ATTRIBUTE] = self
        self._hooks.install(module)
        self.calls = CompiledCalls(module, self._compile_arguments, self._skip, self._supervisor.say)
        self._copies.guard(module)

    def unshard(self) -> None:
        """Gives the module whole parameters and its own classes back, on this engine's device, and closes the engine.
        Collective."""
        module = self._sharded_module()
        assert self.calls is not None
        self.calls.restore()
        self._hooks.remove()
        self._copies.release()
        make_plain(self.sharder, module)
        self.cycle.close()
        del module.__dict__[_ATTRIBUTE]
        self.close()

    def full_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> AbstractContextManager[None]:
        """Inside, ``module`` (by default all) has whole parameters, and edits reach the shards on exit. Collective."""
        return full_parameters(self.sharder, module or self._sharded_module(), writeback)

    def _sharded_module(self) -> nn.Module:
        if self.module is None:
            raise RuntimeError("The engine has no module yet. Call engine.shard(module) first.")
        return self.module

    # -- steps; see lightning_zero.step.cycle

    def train_step(self) -> AbstractContextManager[None]:
        """Surrounds the forward (and, in manual optimization, everything else) of a training step.

        The first one runs eagerly and shows which module calls to compile.
        """
        self._sharded_module()
        return self.cycle.train_step()

    def before_step(self) -> None:
        """Must come before shards are overwritten otherwise than in ``engine.optimizers.stepping``."""
        self.cycle.before_step()

    def eval_step(self) -> None:
        """Must come before a forward outside of training: weights may have been exchanged since the last one."""
        self.cycle.eval_step()

    def _gradients_came(self) -> None:
        self.cycle.gradients_came()

    def shards_in_sight(self) -> AbstractContextManager[None]:
        """Inside, ``module.weight`` is the registered parameter: optimizers are made of these."""
        return self.sharder.view.shards()

    # -- state

    def model_state(self) -> dict[str, Any]:
        """Whole values on rank 0's CPU, with the plain module's keys; empty elsewhere. Collective."""
        module = self._sharded_module()
        return model_state(module, self._hooks)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole values on rank 0's CPU, in torch's own form; empty elsewhere. Collective."""
        return optimizer_state(optimizer, self.sharder)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's part of a whole state dict."""
        optimizer.load_state_dict(shard_optimizer_state(state, optimizer, self.sharder))

    def close(self) -> None:
        """Frees what the executor holds. The module's weights cannot be read afterwards; see :meth:`unshard`."""
        self.replays.drop()
        self.executor.close()
        self.watchdog.close()

    def __repr__(self) -> str:
        live = self.sharder.live
        total = sum(record.layout.numel for record in live)
        compiled = sorted(self.calls.modules) if self.calls else []
        return (
            f"Engine(rank {self.rank} of {self.world_size} on {self.device}; {len(live)} parameters, {total:,} "
            f"elements; {self.sharder.memory.shards}; compiled: {compiled or 'nothing'})"
        )


class _Compiled:
    """What one engine's compiled code needs in each cycle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._eager_reads = -1

    def allocate(self) -> None:
        engine = self._engine
        if engine.peers.allocate(engine.sharder.memory):
            engine._costs = None  # were those of copies
            engine.replays.configure(engine.config, engine.peers.missing)
            engine._compile_anew()

    def prepare(self) -> None:
        engine, config = self._engine, self._engine.config
        assert engine.calls is not None
        if config.compute_dtype is not None and config.compiled.enabled:
            engine.executor.weights.write_shadows()
        again = engine._budget.decided(config.compiled)
        if again is not None:
            engine._compile_arguments = again
            engine.calls.compile_again(again)
        kept = engine._budget.until_step(config.compiled)
        if kept:
            engine.sharder.memory.allocate_resident(config.compute_dtype, small_weight_bytes(config.compiled), kept)

    @contextmanager
    def surround(self) -> Iterator[None]:
        engine = self._engine
        calls = engine.calls
        assert calls is not None
        first = engine.config.compiled.enabled and not (calls.modules or calls.eager)
        reads = self._count_eager_reads()
        with ExitStack() as stack:
            stack.enter_context(calls.step(first))
            # These cost a call for each tensor that autograd saves, for nothing where compiled code reads all weights.
            if first or self._eager_reads != 0:
                stack.enter_context(regather_saved_weights(engine.sharder))
            yield
        if first:
            engine._supervisor.first_step_showed(engine.sharder.view.last_read, calls.notes)
        self._eager_reads = self._count_eager_reads() - reads

    def stepped(self) -> None:
        self._engine._budget.optimizer_steps()

    def drop_replays(self) -> None:
        self._engine.replays.drop()

    def reset(self) -> None:
        self._engine.replays.drop()
        self._eager_reads = -1

    def _count_eager_reads(self) -> int:
        return self._engine.executor.counters().get("eager_gathers", 0)
