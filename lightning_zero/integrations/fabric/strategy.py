"""Translates what Fabric is asked for into engine calls, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_zero.compat.lightning_private import BackwardSyncControl, EmptyInit
from lightning_zero.compile.events import GraphObserver, PassObserver
from lightning_zero.compile.capture.compiler_warm_up import warm_up
from lightning_zero.compile.capture.compiler_warm_up import start_compile_workers
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.arguments import engine_config, options_init
from lightning_zero.integrations.fabric.arguments import Arguments
from lightning_zero.integrations.fabric.loop import LoopTracker
from lightning_zero.integrations.fabric.module import ShardedModule
from lightning_zero.integrations.fabric.optimizers import find_loop, prepare_optimizer
from lightning_zero.integrations.fabric.precision import zero_precision
from lightning_zero.integrations.fabric.processes import FabricProcessStrategy
from lightning_zero.integrations.fabric.saving import FabricCheckpointing
from lightning_zero.integrations.inspection import Inspection
from lightning_zero.integrations.precision import with_precision
from lightning_zero.integrations.processes import without_nccl_abort
from lightning_zero.integrations.uncompile import save_compiled_names, accept_compiled_names, uncompile_modules
from lightning_zero.native.ahead import BackgroundBuild
from lightning_zero.native.watchdog import SequenceId

__all__ = ["FabricZeroStrategy"]


class FabricZeroStrategy(Inspection, FabricCheckpointing, FabricProcessStrategy):
    """ZeRO-3 for Fabric: parameters, gradients and optimizer state are sharded over all ranks, and what a training step
    calls is compiled. With ``stage`` 2 or 1 less is sharded.

    Use it by name after ``import lightning_zero``: ``Fabric(strategy="zero3_compile")``, ``"zero2_compile"``,
    ``"zero1_compile"``, or ``"zero3"`` without compilation. A loop stays as it is. Calls of the model with gradients
    are training, those without are evaluation; the first training step runs eagerly and shows what to compile.
    Gradients are reduced in each backward, inside ``fabric.no_backward_sync()``, too, where they do not stay whole
    (``stage=1``).

    Each model that is set up has an engine and an optimizer of its own, or several; methods that show plans, passes and
    counts are about the one that was set up last.
    """

    lightning_module = None

    @options_init(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        self._options = engine_config(arguments)
        self._engine: Engine | None = None
        self._observers: list[GraphObserver] = []
        self._pass_observers: list[PassObserver] = []
        self._under_construction: list[Engine] = []  # whose models have not been set up
        self._loop_refs: list[weakref.ref[LoopTracker]] = []  # in the order of their setup, the same on every rank
        super().__init__(
            accelerator=arguments.accelerator,
            parallel_devices=arguments.parallel_devices,
            cluster_environment=arguments.cluster_environment,
            checkpoint_io=arguments.checkpoint_io,
            precision=arguments.precision,
        )
        self._init_processes(arguments.process_group_backend, arguments.timeout, arguments.tuning.report_stall_after_s)
        self._backward_sync_control = _BackwardSync()
        self._build = BackgroundBuild(self)

    @property
    @override
    def precision(self) -> Precision:
        plugin = self._precision
        return plugin if plugin is not None else zero_precision(Precision(), self._find_engine)

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision = None if plugin is None else zero_precision(plugin, self._find_engine)

    # -- engines

    @property
    def _loops(self) -> list[LoopTracker]:
        return [loop for reference in self._loop_refs if (loop := reference()) is not None and not loop.is_unsharded]

    def _find_engine(self, optimizer: Optimizer) -> Engine:
        return find_loop(optimizer, self._loops).engine

    @override
    def engine_of_optimizer(self, optimizer: Optimizer) -> Engine | None:
        found = (loop for loop in self._loops if any(known is optimizer for known in loop.optimizers))
        return next((loop.engine for loop in found), None)

    @override
    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise MisconfigurationException(
                "No model was set up yet. Call fabric.setup(model, optimizer) or fabric.setup_module(model) first."
            )
        return self._engine

    def _new_engine(self) -> Engine:
        if not torch.distributed.is_initialized():
            raise MisconfigurationException(
                "The strategy was asked for something before processes were started. Call fabric.launch() first."
            )
        config = with_precision(self.precision.precision, self._options)
        start_compile_workers(config.compiled, self.root_device)
        if self._build.is_pending:
            warm_up(config.compiled, self.root_device)
        waited = self._build.finish()
        with without_nccl_abort():
            engine = Engine(self.root_device, config, skip_modules=(Metric,), report=rank_zero_info)
        if waited > 1:
            rank_zero_info(f"Waited {waited:.0f} s for the C++ executor to be built.")
        self._observe_engine(engine)
        engine.cycle.begin_stage()
        self._close_startup()
        return engine

    def _engine_for(self, module: nn.Module) -> Engine:
        """The one by which parts of the module were built as shards, or a new one."""
        found = {id(made): made for child in module.modules() if (made := engine_of(child)) is not None}
        if not found:
            unused = [engine for engine in self._under_construction if not engine.sharder.live]
            engine = unused[0] if unused else self._new_engine()
        else:
            engine = next(iter(found.values()))
            if len(found) > 1 or engine not in self._under_construction:
                raise MisconfigurationException(
                    f"{type(module).__name__}, or a part of it, is sharded already: it was set up before, or trained "
                    "by another Fabric or Trainer, or built in one fabric.init_module() with a model that was set up "
                    "before. Set each model up once, build each in an init_module() of its own, or call "
                    "lightning_zero.unshard(model) in between."
                )
        if engine in self._under_construction:
            self._under_construction.remove(engine)
        return engine

    # -- setup

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around the construction of a model: every layer is sharded as soon as it is built, so no rank ever holds the
        whole model. Collective."""
        engine = self._new_engine()
        self._under_construction.append(engine)
        empty, dtype = EmptyInit(enabled=bool(empty_init)), self.precision.module_init_context()
        with self.root_device, engine.construction(), empty, dtype:
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Parameters and buffers move when they are sharded, one at a time; a model without parameters moves now."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards the module in place, and compiles what it calls in the first training step. Collective.

        Raises:
            MisconfigurationException: it is sharded already, or has no parameters.
            UnsupportedError: a parameter or module that cannot be sharded.
            RankMismatchError: ranks hold different models.
        """
        if next(module.parameters(), None) is None:
            raise MisconfigurationException(
                f"{type(module).__name__} has no parameters, so there is nothing to shard. Use it as it is, without "
                "fabric.setup(); fabric.to_device(module) moves it."
            )
        engine = self._engine_for(module)
        self._engine = engine
        compiled = uncompile_modules(module)
        accept_compiled_names(module, compiled)
        engine.shard(module)
        save_compiled_names(compiled)
        for child in module.modules():
            if isinstance(child, Metric):
                child.to(self.root_device)
        loop = LoopTracker(engine, self._options.compile_backend, rank_zero_info)
        self._loop_refs = [*(weakref.ref(known) for known in self._loops), weakref.ref(loop)]
        return ShardedModule(module, loop)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """
        Raises:
            UnsupportedError: it needs whole parameters, or has others than those of one model that was set up.
        """
        prepare_optimizer(optimizer, find_loop(optimizer, self._loops))
        return optimizer

    # -- steps

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            for loop in self._loops:
                if loop.has_trained:
                    stack.enter_context(loop.backward())
            super().backward(tensor, module, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        loop = find_loop(optimizer, self._loops)
        result = super().optimizer_step(optimizer, **kwargs)
        loop.after_step()
        return result

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scales gradients to a norm over all ranks of at most ``max_norm``; returns the norm before, 0-dim on the
        device. Collective. The host waits for it only with ``error_if_nonfinite``.

        Raises:
            RuntimeError: the norm is NaN or infinite; gradients are of no use then.
        """
        engine = self._find_engine(optimizer)
        if float(norm_type) != 2.0:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        engine.cycle.finalize_gradients()
        norm = engine.optimizers.stepper(optimizer).clip_norm(float(max_norm))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of gradients is {norm.item()}, so they cannot be clipped. Look for what the loss was, "
                "or pass error_if_nonfinite=False and skip the step where the norm that is returned is not finite."
            )
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        engine = self._find_engine(optimizer)
        self.precision.unscale_gradients(optimizer)
        engine.cycle.finalize_gradients()
        engine.optimizers.stepper(optimizer).clip_value(float(clip_val))

    # -- what ranks do together

    @override
    def _watch_collective(self, what: str) -> AbstractContextManager[None]:
        loops = self._loops
        for loop in loops:
            loop.engine.sharder.sync.after_writing()  # whoever comes last may want to read what this rank has written
        return loops[0].engine.watchdog.waiting(what, SequenceId.WORLD) if loops else nullcontext()

    @override
    def failed(self, error: BaseException) -> None:
        super().failed(error)
        for loop in self._loops:
            loop.engine.watchdog.fail(error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(loop.engine) for loop in self._loops) or 'nothing set up'})"


class _BackwardSync(BackwardSyncControl):
    """Gradients are reduced in each backward and added up in shards; where there are several hosts, these may wait."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        engines = (made for child in module.modules() if (made := engine_of(child)) is not None)
        engine = next(engines, None)
        return engine.cycle.accumulating() if enabled and engine is not None else nullcontext()
