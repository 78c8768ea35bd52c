"""Translate Fabric's strategy interface into engine calls."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import ReduceOp
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.compat.lightning_private import BackwardSyncControl, EmptyInit
from lightning_zero.config import Options
from lightning_zero.config.schema import options
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.console import show_info
from lightning_zero.integrations.fabric.fabric_checkpoints import FabricCheckpointing
from lightning_zero.integrations.fabric.loop import LoopTracker, ShardedModule
from lightning_zero.integrations.fabric.optimizer_setup import find_loop, prepare_optimizer
from lightning_zero.integrations.fabric.precision import zero_precision
from lightning_zero.integrations.precision import with_precision
from lightning_zero.integrations.processes import FabricLauncher, reduce_in_place
from lightning_zero.integrations.strategy_base import options_init
from lightning_zero.native.watchdog import SequenceId, ShownErrorHook


@options
class FabricArguments(Options):
    """Arguments of ``FabricZeroStrategy``: the options, and those that Fabric passes to every strategy."""

    owner: ClassVar[str] = "FabricZeroStrategy"

    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision: Precision | None = None


class FabricZeroStrategy(FabricCheckpointing):
    """ZeRO-3 for Fabric: shard parameters, gradients and optimizer state, and compile training steps.

    Use it by name after ``import lightning_zero``: ``Fabric(strategy="zero3_compile")``, ``"zero2_compile"``,
    ``"zero1_compile"``, or ``"zero3"`` without compilation. A loop needs no changes. Calls of the model with gradients
    are training, those without are evaluation. The first training step runs eagerly and determines the modules to
    compile. Each backward reduces gradients, also inside ``fabric.no_backward_sync()``, except with ``stage=1``.

    Each model that is set up has its own engine and one or several optimizers. Methods that return plans, passes and
    counts refer to the model that was set up last.

    Examples:
        >>> from lightning.fabric import Fabric
        >>> from lightning_zero import FabricZeroStrategy
        >>> fabric = Fabric(strategy=FabricZeroStrategy(stage=2), accelerator="cpu", devices=2)
    """

    api_name = "Fabric"
    launcher_type = FabricLauncher
    lightning_module = None

    @options_init(FabricArguments)
    def __init__(self, arguments: FabricArguments) -> None:
        self._init_engine(arguments)
        self._under_construction: list[Engine] = []  # engines whose models have not been set up
        self._loop_refs: list[weakref.ref[LoopTracker]] = []  # in the order of setup, the same on every rank
        super().__init__(
            accelerator=arguments.accelerator,
            parallel_devices=arguments.parallel_devices,
            cluster_environment=arguments.cluster_environment,
            checkpoint_io=arguments.checkpoint_io,
            precision=arguments.precision,
        )
        self._backward_sync_control = _BackwardSync()
        self._begin()

    @property
    @override
    def precision(self) -> Precision:
        plugin = self._precision
        return plugin if plugin is not None else zero_precision(Precision(), self._find_engine)

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision = None if plugin is None else zero_precision(plugin, self._find_engine)

    # -- processes

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        install_excepthook(self)

    @override
    def _watch_collective(self, description: str) -> AbstractContextManager[None]:
        engines = [loop.engine for loop in self._loops]
        for engine in engines:
            engine.sharder.sync.after_writing()  # other ranks may wait to read this rank's writes
        return engines[0].watchdog.waiting(description, SequenceId.WORLD) if engines else nullcontext()

    def _watch_collective_of(self, group: Any, description: str) -> AbstractContextManager[None]:
        everyone = group is None or group is torch.distributed.group.WORLD
        return self._watch_collective(description) if everyone and torch.distributed.is_initialized() else nullcontext()

    @override
    def all_reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._watch_collective_of(group, "Fabric's all_reduce"):
            return reduce_in_place(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with self._watch_collective_of(group, "Fabric's all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def report_failure(self, error: BaseException) -> None:
        """Report an exception that ends this process to the other ranks."""
        if self._startup is not None:
            self._startup.fail(error)
        for loop in self._loops:
            loop.fail(error)

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
                "The strategy was used before processes were started. Call fabric.launch() first."
            )
        config = with_precision(self.precision.precision, self._options)
        engine, _ = self._create_engine(config)
        engine.cycle.begin_stage()
        self._close_startup()
        return engine

    def _engine_for(self, module: nn.Module) -> Engine:
        """Return the engine that built parts of the module as shards, or a new one."""
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
        """Shard every layer of a model as soon as it is built, so that no rank holds all of it. Collective."""
        engine = self._new_engine()
        self._under_construction.append(engine)
        empty, dtype = EmptyInit(enabled=bool(empty_init)), self.precision.module_init_context()
        with self.root_device, engine.construction(), empty, dtype:
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move a module without parameters; others move parameter by parameter when they are sharded."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module in place; the first training step determines the modules to compile. Collective.

        Raises:
            MisconfigurationException: The module is sharded already, or has no parameters.
            UnsupportedError: A parameter or module cannot be sharded.
            RankMismatchError: Ranks hold different models.
        """
        if next(module.parameters(), None) is None:
            raise MisconfigurationException(
                f"{type(module).__name__} has no parameters, so there is nothing to shard. Use it as it is, without "
                "fabric.setup(); fabric.to_device(module) moves it."
            )
        engine = self._engine_for(module)
        self._engine = engine
        self._shard_uncompiled(engine, module)
        self._move_metrics(module)
        loop = LoopTracker(engine, show_info)
        self._loop_refs = [*(weakref.ref(known) for known in self._loops), weakref.ref(loop)]
        loop.leave()
        return ShardedModule(module, loop)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer to step shards.

        Raises:
            UnsupportedError: It needs full parameters, or has others than those of one model that was set up.
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
        """Scale gradients to a norm over all ranks of at most ``max_norm``. Collective.

        Returns:
            The norm before, 0-dim on the device. The host waits for it only with ``error_if_nonfinite``.

        Raises:
            RuntimeError: The norm is NaN or infinite; the gradients are unusable then.
        """
        engine = self._find_engine(optimizer)
        if float(norm_type) != 2.0:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        engine.cycle.finalize_gradients()
        norm = engine.optimizers.stepper(optimizer).clip_norm(float(max_norm))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of gradients is {norm.item()}, so they cannot be clipped. Check the loss, or "
                "pass error_if_nonfinite=False and skip the step if the returned norm is not finite."
            )
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        engine = self._find_engine(optimizer)
        self.precision.unscale_gradients(optimizer)
        engine.cycle.finalize_gradients()
        engine.optimizers.stepper(optimizer).clip_value(float(clip_val))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(loop.engine) for loop in self._loops) or 'nothing set up'})"


class _BackwardSync(BackwardSyncControl):
    """Let several hosts delay the reduction of gradients; on one host each backward reduces them."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        engines = (made for child in module.modules() if (made := engine_of(child)) is not None)
        engine = next(engines, None)
        return engine.cycle.accumulating() if enabled and engine is not None else nullcontext()


class _ExceptHook:
    """Report exceptions that end this process to other ranks; a user's loop has no other place for that."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.strategies: weakref.WeakSet[FabricZeroStrategy] = weakref.WeakSet()
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            for strategy in list(self.strategies):
                strategy.report_failure(error)
        finally:
            self._previous(kind, error, traceback)


def install_excepthook(strategy: FabricZeroStrategy) -> None:
    """Report exceptions that end this process to ``strategy``."""
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(ShownErrorHook(sys.excepthook))
    sys.excepthook.strategies.add(strategy)
