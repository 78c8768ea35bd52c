"""Composes the floors below: shards a module, compiles its calls, clips, and saves. Does not know Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.manager import CheckpointManager
from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.events import GraphObserver
from lightning_zero.compile.session import CompileSession
from lightning_zero.compile.session import CompiledStepHooks
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
from lightning_zero.sharding.full_params import ModuleCopier, PickledAsNone, full_parameters, unshard_module
from lightning_zero.sharding.module_patching import engine_of_class, is_sharded
from lightning_zero.sharding.param_record import Role
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.symm_mem import PeerTransports
from lightning_zero.step.cycle import StepCycle
from lightning_zero.step.optimizers import OptimizerSteps
from lightning_zero.step.planned import MemoryController

__all__ = ["Engine", "engine_of"]

_ATTRIBUTE = "_zero_engine"


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that sharded ``module``; None for a module that neither was sharded as a whole nor owns shards."""
    return module.__dict__.get(_ATTRIBUTE) or (engine_of_class(module) if is_sharded(module) else None)


class Engine(PickledAsNone):
    """Shards and trains one module over all ranks of a process group; for loops without Lightning. On every rank::

        engine = Engine(device, EngineConfig(compile=True))  # after torch.distributed.init_process_group()
        engine.shard(model)  # which may have been built inside engine.construction(), where no rank ever holds it whole
        optimizer = torch.optim.AdamW(model.parameters())  # engine.optimizers.check(optimizer) raises for unfit ones
        with engine.train_step():  # around each forward; the first runs eagerly, and shows which modules to compile
            loss = model(batch)
        loss.backward()  # gradients are reduced, and added up until zero_grad()
        with engine.optimizers.stepping(optimizer, clip=1.0) as norm:  # also without clip
            optimizer.step()
        engine.eval_step()  # before each forward without gradients

    Without ``train_step`` and ``stepping`` everything computes the same, only eagerly and with more memory.

    Args:
        device: of this rank.
        config: the options of ``ZeroStrategy``, and the dtype of autocast, which must then surround forward.
        mesh: ranks to shard over; by default all. ``torch.distributed`` must be initialised.
        skip_modules: module types that are never compiled.
        observe: sees every graph that is compiled.
        report: shows a line about the progress of compilation to the user; called on every rank.
    """

    def __init__(
        self,
        device: torch.device,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        skip_modules: tuple[type, ...] = (),
        observe: GraphObserver | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        chosen = config or EngineConfig()
        tuning = chosen.tuning
        hosts = tuning.ranks_per_host, tuning.replicate_over == "hosts"
        self.mesh = mesh = mesh or Mesh.of(device, chosen.timeout, *hosts)
        self.config = chosen.for_hosts(mesh.host_count, mesh.intra_host.size)
        assert mesh.device == device, f"a mesh on {mesh.device} for an engine on {device}"
        away = host_master_policy(self.config, mesh)
        self.watchdog = Watchdog(mesh, self.config.tuning.report_stall_after_s)
        self.executor = Executor(mesh, self.config, self._on_backward_end, self._on_new_plan, self.watchdog)
        self.transports = PeerTransports.of(self.config, mesh)
        self.session = CompileSession(
            self.config, mesh, self.executor, self.watchdog, self.transports, skip_modules, report
        )
        if observe is not None:
            self.session.progress.observe(observe)
        ready, report = self.session.budget.may_capture, self.session.progress.report
        configure_nccl_for_capture(device)
        impossible = self.transports.no_capture_reason(self.executor)
        self.replays = CUDAGraphManager(
            self.executor, device, self.config, ready, self._static_tensors, report, impossible
        )
        self.session.begin(self.replays)
        self.sharder = Sharder(
            self.executor, mesh, self.transports, away, self.config.uses_grad_aliasing(mesh.host_count)
        )
        self.sharder.reader.bind_engine(self)
        self._copies = ModuleCopier(self.sharder)
        self.module: nn.Module | None = None
        self.buffers = BufferBroadcast(self.executor, mesh, skip_modules)
        self.buffers.configure(self.config)
        self.checkpoints = CheckpointManager(self.sharder, self.watchdog, self._sharded_module, report)
        compiled = CompiledStepHooks(self.session, self.replays, self.sharder, self.transports)
        self.cycle = cycle = StepCycle(self.executor, self.watchdog, self.sharder, self.buffers, compiled)
        self.optimizers = OptimizerSteps(self.sharder, self.cycle, self.config)
        self.memory = MemoryController(compiled, self.optimizers)
        self.session.budget.accumulates = lambda: cycle.accumulates
        cycle.on_accumulation_begin = self.memory.gradients.on_accumulation

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def configure(self, config: EngineConfig) -> None:
        """Other options from now on; legal between steps. Where one of these errors is raised, all are as before.

        Raises:
            UnsupportedError: an option that was settled when the model was sharded is to be another, see
                :class:`~lightning_zero.config.schema.OnChange`; or replays are demanded where there can be none.
            ValueError: passes that are switched off are needed with these options.
        """
        config = self.memory.settled(config.for_hosts(self.mesh.host_count, self.mesh.intra_host.size))
        if config == (before := self.memory.settled(self.config)) == self.memory.settled(self.session.config):
            return
        check_changes(before, config)
        for part in (self.transports, self.replays, self.session):
            part.check(config)
        self.transports.configure(config)
        self.cycle.end_accumulation()
        self.config = config
        self.watchdog.configure(config.tuning.report_stall_after_s)
        self.executor.configure(config)
        self.replays.configure(config)
        self.buffers.configure(config)
        self.session.configure(config)

    def _static_tensors(self) -> Iterator[Tensor]:
        module = self._sharded_module()  # what compiled graphs read that stays where it is
        return chain(module.parameters(), module.buffers(), self.sharder.memory.tensors(Role.UNSHARDED_CACHE))

    def _on_new_plan(self, digest: str, text: str) -> None:
        self.session.check_plan(digest, text)

    def construction(self) -> AbstractContextManager[None]:
        """Inside, shard modules as they are built; see ``sharding/construction.py``. Collective."""
        return sharded_construction(self.sharder, self.checkpoints.hooks)

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
        self.checkpoints.hooks.install(module)
        self.session.attach(module)
        self._copies.guard(module)

    def unshard(self) -> None:
        """Gives the module whole parameters and its own classes back, on this engine's device, and closes the engine.
        Collective."""
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
        """Inside, ``module`` (by default all) has whole parameters, and edits reach the shards on exit. Collective."""
        return full_parameters(self.sharder, module or self._sharded_module(), writeback)

    def _sharded_module(self) -> nn.Module:
        if self.module is None:
            raise RuntimeError("The engine has no module yet. Call engine.shard(module) first.")
        return self.module

    def train_step(self) -> AbstractContextManager[None]:
        """Surrounds the forward (and, in manual optimization, everything else) of a training step.

        The first one runs eagerly and shows which module calls to compile."""
        self._sharded_module()
        return self.cycle.train_step()

    def before_step(self) -> None:
        """Must come before shards are overwritten otherwise than in ``engine.optimizers.stepping``."""
        self.cycle.before_step()

    def eval_step(self) -> None:
        """Must come before a forward outside of training: weights may have been exchanged since the last one."""
        self.cycle.eval_step()

    def _on_backward_end(self) -> None:
        self.cycle.on_backward_end()

    def registered_parameters(self) -> AbstractContextManager[None]:
        """Inside, ``module.weight`` is the registered parameter: optimizers are made of these."""
        return self.sharder.reader.reading_shards()

    def model_state(self) -> dict[str, Any]:
        """Whole values on rank 0's CPU, with the plain module's keys; empty elsewhere. Collective."""
        return self.checkpoints.model_state()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole values on rank 0's CPU, in torch's own form; empty elsewhere. Collective."""
        return self.checkpoints.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's part of a whole state dict."""
        self.optimizers.load(
            optimizer, self.checkpoints.local_optimizer_state(optimizer, state, self.optimizers.empty_state)
        )

    def close(self) -> None:
        """Frees what the executor holds. The module's weights cannot be read afterwards; see :meth:`unshard`."""
        self.checkpoints.saver.close()
        self.replays.close()
        self.executor.close()
        self.watchdog.close()

    def __repr__(self) -> str:
        live = self.sharder.live
        total = sum(record.layout.numel for record in live)
        compiled_modules = self.session.compiled_modules
        compiled = (
            sorted(set(compiled_modules.modules) - set(compiled_modules.limit_reasons)) if compiled_modules else []
        )
        return (
            f"Engine(rank {self.rank} of {self.world_size} on {self.device}; {len(live)} parameters, {total:,} "
            f"elements; {self.sharder.memory.shards}; compiled: {compiled or 'nothing'})"
        )
