"""Shard, compile, step and save one module: :class:`Engine` builds the parts and connects them.

The engine does not depend on Lightning. The strategies in :mod:`lightning_zero.integrations` drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.manager import CheckpointManager
from lightning_zero.compat.grouped_products import cast_grouped_products
from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.events import GraphObserver
from lightning_zero.compile.session import CompiledStepHooks, CompileSession
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import check_changes
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.capture import configure_nccl_for_capture
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.offload.pinned_memory import host_master_policy
from lightning_zero.sharding.buffers import BufferBroadcast
from lightning_zero.sharding.construction import sharded_construction
from lightning_zero.sharding.fp8_health import Fp8Health
from lightning_zero.sharding.frozen_weights import frozen_weights
from lightning_zero.sharding.full_params import ModuleCopier, PickledAsNone, full_parameters, unshard_module
from lightning_zero.sharding.module_patching import engine_of_class, is_sharded
from lightning_zero.sharding.param_record import Role
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.symm_mem import PeerTransports
from lightning_zero.step.cycle import StepCycle
from lightning_zero.step.memory_controller import MemoryController
from lightning_zero.step.optimizer_steps import OptimizerSteps
from lightning_zero.task_progress import TaskProgress

_ATTRIBUTE = "_zero_engine"


def engine_of(module: nn.Module) -> Engine | None:
    """Return the engine that sharded ``module``; None if the module was not sharded and holds no shards."""
    return module.__dict__.get(_ATTRIBUTE) or (engine_of_class(module) if is_sharded(module) else None)


class Engine(PickledAsNone):
    """Shard and train one module over all ranks of a process group, in loops without Lightning.

    Without ``train_step`` and ``stepping`` the results are the same, but computed eagerly and with more memory.

    Args:
        device: Device of this rank.
        config: The options of ``ZeroStrategy`` and the autocast dtype. The caller runs forward inside that autocast.
        mesh: Ranks to shard over; by default all. ``torch.distributed`` must be initialized.
        skip_modules: Module types that are never compiled.
        observe: Called with every compiled graph.
        report: Called on every rank with one line for the user.
        tasks: Shows the user how long compilations take.

    Examples:
        On every rank::

            engine = Engine(device, EngineConfig(compile=True))  # after torch.distributed.init_process_group()
            engine.shard(model)  # or build it inside engine.construction(): no rank then holds all of it
            optimizer = torch.optim.AdamW(model.parameters())
            with engine.train_step():  # around each forward; the first one runs eagerly
                loss = model(batch)
            loss.backward()  # reduces gradients and accumulates them until zero_grad()
            with engine.optimizers.stepping(optimizer, clip=1.0) as norm:  # clip is optional
                optimizer.step()
            engine.eval_step()  # before each forward without gradients
    """

    def __init__(
        self,
        device: torch.device,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        skip_modules: tuple[type, ...] = (),
        observe: GraphObserver | None = None,
        report: Callable[[str], None] | None = None,
        tasks: TaskProgress | None = None,
    ) -> None:
        options = config or EngineConfig()
        tuning = options.tuning
        hosts = tuning.ranks_per_host, tuning.replicate_over == "hosts"
        self.mesh = mesh = mesh or Mesh.from_world(device, options.timeout, *hosts)
        self.config = options.for_hosts(mesh.host_count, mesh.intra_host.size)
        assert mesh.device == device, f"a mesh on {mesh.device} for an engine on {device}"
        host_policy = host_master_policy(self.config, mesh)
        self.watchdog = Watchdog(mesh, self.config.tuning.report_stall_after_s)
        self.executor = Executor(mesh, self.config, self._on_backward_end, self._on_new_plan, self.watchdog)
        self.transports = PeerTransports.of(self.config, mesh)
        self.session = CompileSession(
            self.config, mesh, self.executor, self.watchdog, self.transports, skip_modules, report, tasks
        )
        if observe is not None:
            self.session.progress.observe(observe)
        ready, report = self.session.planner.is_settled, self.session.progress.report
        configure_nccl_for_capture(device)
        impossible = self.transports.no_capture_reason(self.executor)
        self.cuda_graphs = CUDAGraphManager(
            self.executor, device, self.config, ready, self._static_tensors, report, impossible
        )
        self.session.begin(self.cuda_graphs)
        self.sharder = Sharder(
            self.executor,
            mesh,
            self.transports,
            host_policy,
            self.config.uses_grad_aliasing(mesh.host_count),
            self.config.quantizes_state,
            frozen_weights(self.config),
        )
        self.sharder.reader.bind_engine(self)
        self._copies = ModuleCopier(self.sharder)
        self.module: nn.Module | None = None
        self.buffers = BufferBroadcast(self.executor, mesh, skip_modules)
        self.buffers.configure(self.config)
        self.checkpoints = CheckpointManager(self.sharder, self.watchdog, self._sharded_module, report)
        compiled = CompiledStepHooks(self.session, self.cuda_graphs, self.sharder, self.transports)
        self._compiled = compiled
        self.cycle = cycle = StepCycle(self.executor, self.watchdog, self.sharder, self.buffers, compiled)
        self.optimizers = OptimizerSteps(self.sharder, self.cycle, self.config)
        self.memory = MemoryController(compiled, self.optimizers, lambda: cycle.accumulates)
        cycle.events.accumulation_begin.append(self.memory.gradients.on_accumulation)
        cycle.events.forward_begin.append(self.memory.gradients.on_forward)

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """Return the number of this rank among all ranks of the mesh."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the mesh."""
        return self.mesh.world_size

    @property
    def fp8_health(self) -> Fp8Health | None:
        """Return the health of this rank's fp8 matrices; None without ``fp8_health_every`` or before training."""
        return self._compiled.fp8_health

    def configure(self, config: EngineConfig) -> None:
        """Apply other options between steps. If an error is raised, no option has changed.

        Raises:
            UnsupportedError: The option was fixed when the model was sharded, see
                :class:`~lightning_zero.config.schema.OnChange`; or CUDA graphs are required but not possible.
            ValueError: These options need a pass that is switched off.
        """
        config = self.memory.with_moved_masters(config.for_hosts(self.mesh.host_count, self.mesh.intra_host.size))
        if (
            config
            == (before := self.memory.with_moved_masters(self.config))
            == self.memory.with_moved_masters(self.session.config)
        ):
            return
        check_changes(before, config)
        for part in (self.transports, self.cuda_graphs, self.session):
            part.check(config)
        self.transports.configure(config)
        self.cycle.end_accumulation()
        self.config = config
        self.watchdog.configure(config.tuning.report_stall_after_s)
        self.executor.configure(config)
        self.cuda_graphs.configure(config)
        self.buffers.configure(config)
        self.session.configure(config)

    def _static_tensors(self) -> Iterator[Tensor]:
        module = self._sharded_module()  # read by compiled graphs at a fixed address
        return chain(module.parameters(), module.buffers(), self.sharder.memory.tensors(Role.UNSHARDED_CACHE))

    def _on_new_plan(self, digest: str, text: str) -> None:
        self.session.check_plan(digest, text)

    def construction(self) -> AbstractContextManager[None]:
        """Shard modules while they are built in this context: no rank holds all of one. Collective."""
        return sharded_construction(self.sharder, self.checkpoints.hooks)

    def shard(self, module: nn.Module) -> None:
        """Replace the module's parameters by shards, in place. Collective.

        The module, its parameters and their ties keep their identity.

        Raises:
            UnsupportedError: A parameter or module cannot be sharded.
            RankMismatchError: Ranks hold different models.
        """
        if engine_of(module) is not None and engine_of(module) is not self:
            raise UnsupportedError(
                "The module is already sharded by another engine. Call lightning_zero.unshard(module) first."
            )
        self.sharder.finish(module)
        self.module = module
        if self.config.compute_dtype is torch.bfloat16:
            cast_grouped_products()
        self.buffers.watch(module)
        module.__dict__[_ATTRIBUTE] = self
        self.checkpoints.hooks.install(module)
        self.session.attach(module)
        self._copies.guard(module)

    def unshard(self) -> None:
        """Restore full parameters and the module's own classes on this engine's device, and close the engine.

        Collective.
        """
        module = self._sharded_module()
        assert self.session.compiled_modules is not None
        self.session.compiled_modules.restore()
        self.checkpoints.hooks.remove()
        self._copies.release()
        unshard_module(self.sharder, module)
        self.cycle.close()
        del module.__dict__[_ATTRIBUTE]
        self.close()

    def full_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> AbstractContextManager[None]:
        """Give ``module`` (by default all) full parameters in this context; write edits to the shards on exit.

        Collective.
        """
        return full_parameters(self.sharder, module or self._sharded_module(), writeback)

    def _sharded_module(self) -> nn.Module:
        if self.module is None:
            raise RuntimeError("The engine has no module yet. Call engine.shard(module) first.")
        return self.module

    def train_step(self) -> AbstractContextManager[None]:
        """Surround the forward of a training step; in manual optimization also backward and optimizer steps.

        The first step runs eagerly and records the module calls to compile.
        """
        self._sharded_module()
        return self.cycle.train_step()

    @contextmanager
    def overwriting_weights(self) -> Iterator[None]:
        """Surround writes of other values to all weights, as by loading. Collective.

        Example::

            with engine.overwriting_weights():
                model.load_state_dict(weights)
        """
        self.buffers.stepped()
        sync = self.sharder.sync
        sync.before_overwriting()
        self._compiled.before_overwriting()
        try:
            yield
            self._compiled.after_overwriting()
        finally:
            sync.invalidate_copies()
            sync.after_writing()

    def eval_step(self) -> None:
        """Prepare for a forward outside of training. Call before the forward.

        Weights may have changed since the last one.
        """
        self.cycle.eval_step()

    def _on_backward_end(self) -> None:
        self.cycle.on_backward_end()

    def registered_parameters(self) -> AbstractContextManager[None]:
        """Return the registered parameters from ``module.weight`` in this context.

        Create optimizers from these.
        """
        return self.sharder.reader.reading_shards()

    def model_state(self) -> dict[str, Any]:
        """Return full values on rank 0's CPU under the plain module's keys; empty on other ranks. Collective."""
        return self.checkpoints.model_state()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return full values on rank 0's CPU, in ``torch.optim``'s format. Collective.

        Empty on other ranks.
        """
        return self.checkpoints.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of a full state dict."""
        steps = self.optimizers
        steps.load(
            optimizer,
            self.checkpoints.local_optimizer_state(optimizer, state, steps.empty_state, steps.stored_dtypes_of),
        )

    def close(self) -> None:
        """Free the executor. The module's weights cannot be read afterwards, see :meth:`unshard`."""
        self.checkpoints.saver.close()
        self.cuda_graphs.close()
        self.optimizers.drop_captures()
        self.executor.close()
        self.watchdog.close()

    def __repr__(self) -> str:
        live = self.sharder.live
        total = sum(record.shape.numel() for record in live)
        compiled_modules = self.session.compiled_modules
        compiled = (
            sorted(set(compiled_modules.modules) - set(compiled_modules.limit_reasons)) if compiled_modules else []
        )
        return (
            f"Engine(rank {self.rank} of {self.world_size} on {self.device}; {len(live)} parameters, {total:,} "
            f"elements; {self.sharder.memory.shards}; compiled: {compiled or 'nothing'})"
        )
