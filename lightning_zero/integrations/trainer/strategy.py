"""Translates Lightning's hooks into engine calls, and nothing else."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_zero.compat.lightning_private import optimizers_to_device
from lightning_zero.compile.events import GraphObserver, PassObserver
from lightning_zero.compile.capture.compiler_warm_up import warm_up
from lightning_zero.compile.capture.compiler_warm_up import start_compile_workers
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.arguments import engine_config, options_init
from lightning_zero.integrations.inspection import Inspection
from lightning_zero.integrations.oom_hint import explain
from lightning_zero.integrations.precision import with_precision
from lightning_zero.integrations.processes import without_nccl_abort
from lightning_zero.integrations.trainer.arguments import Arguments
from lightning_zero.integrations.trainer.averaging import average_shards
from lightning_zero.integrations.trainer.checkpoint_callbacks import patch_checkpoint_callbacks
from lightning_zero.integrations.trainer.checks import check_sharded_module, check_trainable, check_callbacks
from lightning_zero.integrations.trainer.evaluation_stop import EvaluationStop
from lightning_zero.integrations.trainer.finetuning import compare_shards_by_identity
from lightning_zero.integrations.trainer.micro_batches import one_micro_batch
from lightning_zero.integrations.trainer.precision import zero_precision
from lightning_zero.integrations.trainer.processes import ProcessStrategy
from lightning_zero.integrations.trainer.saving import TrainerCheckpointing
from lightning_zero.integrations.trainer.sigterm import Start, check_stop_now, check_stop_on_cpu, has_deferred_sigterm, defer_sigterm, expose_sigterm
from lightning_zero.integrations.trainer.stage_end import wait_for_stage_end
from lightning_zero.integrations.uncompile import save_compiled_names, accept_compiled_names, uncompile_modules
from lightning_zero.native.ahead import BackgroundBuild
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.report.engine_report import startup_summary
from lightning_zero.report.startup_timer import StartupTimer

__all__ = ["ZeroStrategy"]

log = logging.getLogger(__name__)


class ZeroStrategy(Inspection, TrainerCheckpointing, ProcessStrategy):
    """ZeRO-3: parameters, gradients and optimizer state are sharded over all ranks, and the modules a training step
    calls are compiled. With ``stage`` 2 or 1 less is sharded.

    Use it by name after ``import lightning_zero``: ``Trainer(strategy="zero3_compile")``, ``"zero2_compile"``,
    ``"zero1_compile"``, or ``"zero3"`` without compilation. Precision, clipping, accumulation and the rest are Trainer
    arguments.
    """

    strategy_name = "zero3"

    @options_init(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        self._options = engine_config(arguments)
        self._engine: Engine | None = None
        self._remove_stop_check: Callable[[], None] | None = None
        self._observers: list[GraphObserver] = []
        self._pass_observers: list[PassObserver] = []
        self._lightning_module_ref: pl.LightningModule | None = None
        self._prepared = False  # in this stage
        self._ranks_can_save, self._is_loading = None, False
        self._stop: EvaluationStop | None = None
        self._stage = 0
        super().__init__(
            accelerator=arguments.accelerator,
            parallel_devices=arguments.parallel_devices,
            cluster_environment=arguments.cluster_environment,
            checkpoint_io=arguments.checkpoint_io,
            precision_plugin=arguments.precision_plugin,
            process_group_backend=arguments.process_group_backend,
            timeout=arguments.timeout,
            report_stall_after_s=arguments.tuning.report_stall_after_s,
        )
        self._build = BackgroundBuild(self)
        self._start = StartupTimer(self._compile_timings)

    # -- what the Trainer asks before anything runs

    @property
    @override
    def precision_plugin(self) -> Precision:
        plugin = self._precision_plugin
        return plugin if plugin is not None else zero_precision(Precision(), self._require_engine)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else zero_precision(plugin, self._require_engine)

    # Lightning assigns this before it checks whether the strategy accepts a compiled LightningModule. Ours compiles by
    # itself, so what the user compiled is taken apart here.
    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._lightning_module_ref

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        if module is not None and getattr(module, "_compiler_ctx", None) is not None:
            rank_zero_info("The LightningModule was compiled by hand; the strategy compiles it its own way instead.")
            to_uncompiled(module)
        self._lightning_module_ref = module

    # -- setup

    @override
    def setup_environment(self) -> None:
        self._ranks_can_save, self._is_loading = None, False
        module = self.lightning_module
        if module is not None:
            patch_checkpoint_callbacks(module.trainer)
        with without_nccl_abort():
            super().setup_environment()
            engine = (module is not None and engine_of(module)) or self._require_engine()
        # From here on, so that whatever keeps a rank away in one of the user's hooks is seen by the others.
        engine.cycle.begin_stage()
        self._stage = engine.checkpoints.together.begin_stage()
        self._stop = EvaluationStop(engine.mesh, self._stage)
        self._close_startup()

    @override
    def _watch_collective(self, what: str) -> AbstractContextManager[None]:
        if self._engine is None:
            return nullcontext()
        self._engine.sharder.sync.after_writing()  # whoever comes last may want to read what this rank has written
        return self._engine.watchdog.waiting(what, SequenceId.WORLD)

    @override
    def _object_group(self) -> Any:
        mesh = None if self._engine is None else self._engine.mesh
        if mesh is None or mesh.world_size != self.world_size:
            return super()._object_group()
        return mesh.control_group  # by way of a device, the host would wait for all that it was given

    def _run_stop_check(self, start: Start) -> None:
        engine = self._require_engine()
        engine.sharder.sync.after_writing()
        engine.executor.collective("the question before each batch whether to stop for a SIGTERM", SequenceId.CONTROL, start)

    def _require_engine(self) -> Engine:
        if self._engine is None:
            if not torch.distributed.is_initialized():
                raise MisconfigurationException(
                    "The strategy was asked for something before it was set up. Call this inside a hook of the "
                    "LightningModule or a callback, while trainer.fit() or another stage is running."
                )
            start_compile_workers(self._options.compiled, self.root_device)
            if self._build.is_pending:
                warm_up(self._options.compiled, self.root_device)
            self._start.built(self._build.finish())
            self._engine = Engine(self.root_device, self._config(), skip_modules=(Metric,), report=rank_zero_info)
            self._observe_engine(self._engine)
        return self._engine

    def _config(self) -> EngineConfig:
        """The options, and what the Trainer's precision decides."""
        plugin = self._precision_plugin
        return with_precision(plugin.precision, self._options) if plugin is not None else self._options

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model``: every layer is sharded as soon as it is built, so no rank ever holds the whole
        model."""
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
        if (left := engine.checkpoints.halfway.left) is not None:
            engine.checkpoints.halfway.left = None  # once
            rank_zero_warn(f"{left} This stage goes on with what is there.")
        # Shards must not become inference tensors, which training could not use afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainable(engine, trainer.lightning_module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            if not engine.optimizers.on_host:
                optimizers_to_device(self.optimizers, self.root_device)
            self._remove_stop_check = check_stop_on_cpu(trainer, engine.mesh.control_group, self._run_stop_check)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._prepared = False
        self._start = StartupTimer(self._compile_timings, self._options.compile_backend, self._run_summary)
        super().connect(model)

    def _compile_timings(self) -> Mapping[str, float]:
        return {} if self._engine is None else self._engine.session.progress.metrics

    def _run_summary(self) -> str:
        if self._engine is None or self.lightning_module is None:
            return ""
        return startup_summary(self._engine, self.optimizers)

    def _show_start(self, lines: Iterable[str]) -> None:
        for line in lines:
            rank_zero_info(line)

    def _prepare_module(self, trainer: pl.Trainer) -> None:
        """Shards the module and what callbacks hold of it: in ``setup``, or before that, when weights are loaded.

        A checkpoint is read before ``setup``, so that ``configure_optimizers`` and ``on_fit_start`` find what it
        brought. ``on_load_checkpoint`` still has the module as the user built it, and may build it anew; its values
        then go straight into shards.
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
        if trainer.state.fn != TrainerFn.FITTING:  # no plan comes, and ranks may evaluate unevenly
            engine.sharder.memory.settle()
        average_shards(trainer, engine, module, self.root_device)
        compare_shards_by_identity(trainer, engine)
        self.model = module
        self._prepared = True

    def _shard(self, module: pl.LightningModule) -> None:
        engine = self._require_engine()
        compiled = uncompile_modules(module)
        accept_compiled_names(module, compiled)
        self.precision_plugin.convert_module(module)
        # Before evaluation, too: a fit may follow, and synchronised layers evaluate like any others.
        if self._layer_sync is not None:
            with engine.construction():
                self._layer_sync.apply(module)
        try:
            engine.shard(module)
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error
        save_compiled_names(compiled)

    def _adopt(self, engine: Engine, module: pl.LightningModule) -> None:
        check_sharded_module(engine, module, self.root_device, self.precision_plugin, self._layer_sync is not None)
        self._engine = engine
        try:
            engine.configure(self._config())
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def model_to_device(self) -> None:
        """Parameters and buffers are where they belong already; metrics keep their state elsewhere."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
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
        engine.memory.gradients.single_micro_batch = one_micro_batch(trainer)
        engine.optimizers.arrange(self.optimizers)

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        lines = self._start.batch()
        if lines and self.saves_async:
            # What the start has made is looked at now; else the first save's many small objects would have Python look
            # at all there is in the midst of it, or soon after, which takes some 0.5 s.
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
        module = self.lightning_module
        if module is not None and self._stop is not None and self._stop.after_batch(has_deferred_sigterm(module.trainer)):
            expose_sigterm(module.trainer, True)

    @override
    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        expose_sigterm(self.lightning_module.trainer, False)  # that was its last batch

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
        # What Lightning surrounds micro-batches with after which others come.
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

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._startup is not None:
            self._startup.fail(exception)
        if self._engine is not None:
            explain(exception, self._engine)
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

    def leave(self) -> None:
        """End this process within a few seconds after a failure, whatever it still waits for."""
        if self._engine is not None:
            self._engine.watchdog.leave()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine or 'not set up'})"
