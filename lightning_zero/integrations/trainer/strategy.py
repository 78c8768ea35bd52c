"""Translate Lightning's strategy interface and hooks into engine calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.compat.lightning_private import optimizers_to_device
from lightning_zero.config import EngineConfig, Options
from lightning_zero.config.schema import options
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.console import show_info
from lightning_zero.integrations.precision import check_complex, true_dtype, with_precision
from lightning_zero.integrations.processes import TrainerLauncher, reduce_in_place, without_nccl_abort
from lightning_zero.integrations.strategy_base import add_error_notes, options_init
from lightning_zero.integrations.trainer.callbacks import (
    average_shards,
    check_callbacks,
    compare_shards_by_identity,
    patch_checkpoint_callbacks,
)
from lightning_zero.integrations.trainer.gradient_readers import may_read_gradients
from lightning_zero.integrations.trainer.precision import zero_precision
from lightning_zero.integrations.trainer.signals import (
    Start,
    check_stop_now,
    check_stop_on_cpu,
    defer_sigterm,
    wait_for_stage_end,
)
from lightning_zero.integrations.trainer.trainer_checkpoints import TrainerCheckpointing
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.report.engine_report import startup_summary
from lightning_zero.report.startup_timer import StartupTimer

# Hooks in which users may accumulate gradients or call backward several times.
MANUAL_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad")


@options
class Arguments(Options):
    """Arguments of ``ZeroStrategy``: the options, and those that Lightning passes to every strategy."""

    accelerator: pl.accelerators.Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None


class ZeroStrategy(TrainerCheckpointing):
    """ZeRO-3: shard parameters, gradients and optimizer state, and compile the training step's modules.

    Use it by name after ``import lightning_zero``: ``Trainer(strategy="zero3_compile")``, ``"zero2_compile"``,
    ``"zero1_compile"``, or ``"zero3"`` without compilation. Lower stages shard less. Precision, clipping, accumulation
    and the rest are Trainer arguments.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_zero import ZeroStrategy
        >>> strategy = ZeroStrategy(stage=3, reshard_after_forward=False)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    api_name = "Trainer"
    launcher_type = TrainerLauncher
    strategy_name = "zero3"

    @options_init(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        self._init_engine(arguments)
        self._remove_stop_check: Callable[[], None] | None = None
        self._lightning_module_ref: pl.LightningModule | None = None
        self._prepared = False  # in this stage
        self._ranks_can_save, self._is_loading = None, False
        self._stage = 0
        super().__init__(
            accelerator=arguments.accelerator,
            parallel_devices=arguments.parallel_devices,
            cluster_environment=arguments.cluster_environment,
            checkpoint_io=arguments.checkpoint_io,
            precision_plugin=arguments.precision_plugin,
        )
        self._begin()
        self._start = StartupTimer(self._compile_timings)

    # -- before anything runs

    @property
    @override
    def precision_plugin(self) -> Precision:
        plugin = self._precision_plugin
        return plugin if plugin is not None else zero_precision(Precision(), self._require_engine)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else zero_precision(plugin, self._require_engine)

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._lightning_module_ref

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        # Lightning assigns this before it checks if the strategy accepts a compiled LightningModule.
        if module is not None and getattr(module, "_compiler_ctx", None) is not None:
            show_info(
                "The strategy compiles the LightningModule itself and ignores your torch.compile of it. Remove that "
                "call to silence this message."
            )
            to_uncompiled(module)
        self._lightning_module_ref = module

    @property
    def is_distributed(self) -> bool:
        return True  # otherwise the Trainer installs no distributed sampler

    # -- processes

    @override
    def setup_environment(self) -> None:
        self._ranks_can_save, self._is_loading = None, False
        module = self.lightning_module
        if module is not None:
            patch_checkpoint_callbacks(module.trainer)
        with without_nccl_abort():
            super().setup_environment()
            reset_seed()
            engine = (module is not None and engine_of(module)) or self._require_engine()
        # Begin here, so that other ranks notice a rank that a user's hook delays.
        engine.cycle.begin_stage()
        self._stage = engine.checkpoints.ranks.begin_stage()
        self._close_startup()
        if module is not None:
            check_callbacks(module.trainer)  # before their setup: BatchSizeFinder's own error gives no alternative

    @override
    def _watch_collective(self, description: str) -> AbstractContextManager[None]:
        engine = self._engine
        if engine is None:
            return nullcontext()
        engine.sharder.sync.after_writing()  # other ranks may wait to read this rank's writes
        return engine.watchdog.waiting(description, SequenceId.WORLD)

    @override
    def _object_group(self) -> Any:
        mesh = None if self._engine is None else self._engine.mesh
        if mesh is None or mesh.world_size != self.world_size:
            return super()._object_group()
        return mesh.control_group  # on the CPU: a collective on the device would make the host wait for all its work

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._watch_collective("the reduction of a logged value") if group is None else nullcontext():
            return reduce_in_place(tensor, group, reduce_op)

    def _run_stop_check(self, start: Start) -> None:
        engine = self._require_engine()
        engine.sharder.sync.after_writing()
        engine.executor.collective(
            "the question before each batch whether to stop for a SIGTERM", SequenceId.CONTROL, start
        )

    # -- setup

    def _require_engine(self) -> Engine:
        if self._engine is None:
            if not torch.distributed.is_initialized():
                raise MisconfigurationException(
                    "The strategy was used before its setup. Call this inside a hook of the LightningModule or a "
                    "callback, while trainer.fit() or another stage is running."
                )
            self._engine, waited_s = self._create_engine(self._config())
            self._start.built(waited_s)
        return self._engine

    def _config(self) -> EngineConfig:
        plugin = self._precision_plugin
        return with_precision(plugin.precision, self._options) if plugin is not None else self._options

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Shard each layer in ``configure_model`` when it is built; no rank ever holds the full model."""
        module = self.lightning_module
        if not torch.distributed.is_initialized() or (module is not None and engine_of(module) is not None):
            yield
            return
        with self._require_engine().construction():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not self._prepared:
            self._prepare_module(trainer)
        engine = self._require_engine()
        engine.executor.begin_stage()
        # Shards must not become inference tensors, which training could not use afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if trainer.state.fn == TrainerFn.FITTING:
            if not engine.sharder.live:
                raise MisconfigurationException(
                    f"{type(trainer.lightning_module).__name__} has no parameters, so there is nothing to train. Use "
                    "another strategy, or create the network in __init__() or configure_model()."
                )
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            if not engine.optimizers.on_host:
                optimizers_to_device(self.optimizers, self.root_device)
            self._remove_stop_check = check_stop_on_cpu(trainer, engine.mesh.control_group, self._run_stop_check)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._prepared = False
        self._start = StartupTimer(self._compile_timings, self._run_summary)
        super().connect(model)

    def _compile_timings(self) -> Mapping[str, float]:
        engine = self._engine
        return {} if engine is None else engine.session.progress.metrics

    def _run_summary(self) -> str:
        if self._engine is None or self.lightning_module is None:
            return ""
        return startup_summary(self._engine, self.optimizers)

    def _show_start(self, lines: Iterable[str]) -> None:
        for line in lines:
            show_info(line)

    def _prepare_module(self, trainer: pl.Trainer) -> None:
        """Shard the module and its copies in callbacks: in ``setup``, or earlier when weights are loaded.

        A checkpoint is read before ``setup``, so that ``configure_optimizers`` and ``on_fit_start`` see its values.
        ``on_load_checkpoint`` still has the user's module, and may replace it; values then go straight into shards.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_callbacks(trainer)
        defer_sigterm(trainer)
        module = self.lightning_module
        if (adopted := engine_of(module)) is None:
            self._shard(module)
        else:
            self._adopt(adopted, module)
        self.model_to_device()
        engine = self._require_engine()
        if trainer.state.fn != TrainerFn.FITTING:  # there is no plan to wait for, and ranks may evaluate unevenly
            engine.sharder.memory.finalize_layout()
        average_shards(trainer, engine, module, self.root_device)
        compare_shards_by_identity(trainer, engine)
        self.model = module
        self._prepared = True

    def _shard(self, module: pl.LightningModule) -> None:
        engine = self._require_engine()

        def convert() -> None:
            self.precision_plugin.convert_module(module)
            # Also before an evaluation: a fit may follow, and synchronized layers evaluate like any others.
            if self._layer_sync is not None:
                with engine.construction():
                    self._layer_sync.apply(module)

        try:
            self._shard_uncompiled(engine, module, convert)
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error

    def _adopt(self, engine: Engine, module: pl.LightningModule) -> None:
        check_sharded_module(engine, module, self.root_device, self.precision_plugin, self._layer_sync is not None)
        self._engine = engine
        self._start.adopted()
        try:
            engine.configure(self._config())
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def model_to_device(self) -> None:
        """Move metrics; parameters and buffers are on their devices already."""
        assert self.lightning_module is not None
        self._move_metrics(self.lightning_module)
        self.lightning_module._device = self.root_device

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        engine = self._require_engine()
        with engine.registered_parameters():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            try:
                engine.optimizers.check(optimizer)
            except UnsupportedError as error:
                raise MisconfigurationException(str(error)) from error
        engine.memory.gradients.single_micro_batch = has_single_micro_batch(trainer)
        engine.memory.gradients.unread = not may_read_gradients(trainer)
        engine.optimizers.arrange(self.optimizers)

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        lines = self._start.batch()
        if lines and self.saves_async:
            # Collect the start's objects now. Otherwise a collection during or after the first save takes about 0.5 s.
            gc.collect()
        self._show_start(lines)
        with self.precision_plugin.train_step_context(), self._require_engine().train_step():
            output = self.lightning_module.training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization and self.world_size > 1:
            # Lightning refuses None on several ranks, since DDP would hang. Here the rank counts as zero.
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        self._require_engine().cycle.eval_step()
        yield
        self._require_engine().cycle.after_eval()

    @override
    def on_train_end(self) -> None:
        assert self.lightning_module is not None
        check_stop_now(self.lightning_module.trainer)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # Lightning surrounds all micro-batches but the last of a step with this.
        return self._require_engine().cycle.accumulating()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._require_engine().cycle.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self._require_engine().cycle.after_backward()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error
        if self._sharded and self.saves_async:
            self._require_engine().checkpoints.prepare(self.optimizers)
        return result

    # -- end

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._startup is not None:
            self._startup.fail(exception)
        if self._engine is not None:
            add_error_notes(exception, self._engine)
            self._engine.watchdog.fail(exception)
            self._engine.cycle.clean_up()

    @override
    def teardown(self) -> None:
        # The module stays sharded and on its device: another stage, save_checkpoint() or state_dict() may follow.
        self._show_start(self._start.ends())
        self._finish_saving()
        if self._remove_stop_check is not None:
            self._remove_stop_check()
        if self._engine is not None:
            self._engine.cycle.clean_up()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def end_stage(self) -> None:
        """End ``fit`` or another stage on all ranks, after its last hook. Collective."""
        if self._engine is not None:
            wait_for_stage_end(self._engine, self._stage, self._stall_report_s)

    def exit_soon(self) -> None:
        """End this process within a few seconds after a failure, even if it is still waiting."""
        if self._engine is not None:
            self._engine.watchdog.leave()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine or 'not set up'})"


def has_single_micro_batch(trainer: pl.Trainer) -> bool:
    """Return True if every optimizer step has one micro-batch, which gradient aliasing requires."""
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        module.automatic_optimization
        and trainer.accumulate_grad_batches == 1
        and not any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        and not any(is_overridden(name, module, pl.LightningModule) for name in MANUAL_HOOKS)
    )


def check_sharded_module(
    engine: Engine, module: nn.Module, device: torch.device, precision: Precision, sync_batchnorm: bool
) -> None:
    """Raise ``MisconfigurationException`` if a sharded module does not fit this Trainer, or grew."""
    world_size = dist.get_world_size()
    if engine.world_size != world_size or engine.device != device:
        raise MisconfigurationException(
            f"The model was sharded by an earlier Trainer over {engine.world_size} ranks on {engine.device}, and "
            f"cannot be used on {world_size} ranks on {device}. Call lightning_zero.unshard(model) in between."
        )
    added = [name for name, param in module.named_parameters() if engine.sharder.find(param) is None]
    if added:
        raise MisconfigurationException(
            f"{len(added)} parameters were added after the model was sharded, the first is {added[0]!r}. If "
            "configure_model() built the network again, make it return early: `if self.model is not None: return`. If "
            "on_load_checkpoint() built it again, call lightning_zero.unshard(model) before this stage. Otherwise add "
            "parameters before fit()."
        )
    check_complex(module, precision.precision)
    dtype = true_dtype(precision.precision)
    others = {param.dtype for param in module.parameters() if param.is_floating_point()} - {dtype}
    if dtype is not None and others:
        raise MisconfigurationException(
            f"The model was sharded by an earlier Trainer in {', '.join(map(str, others))}, and cannot be converted "
            f"for Trainer(precision={precision.precision!r}) any more. Call lightning_zero.unshard(model) in between."
        )
    unsynchronized = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if sync_batchnorm and any(isinstance(layer, unsynchronized) for layer in module.modules()):
        raise MisconfigurationException(
            "The model was sharded by an earlier Trainer without sync_batchnorm=True, and its layers cannot be "
            "replaced any more. Call lightning_zero.unshard(model) in between, or pass it to the earlier Trainer, too."
        )
