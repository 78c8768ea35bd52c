"""Translates Lightning's hooks into engine calls, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_zero.compat.lightning_private import optimizers_to_device
from lightning_zero.compile.backend import GraphObserver
from lightning_zero.config import CompileConfig, EngineConfig, ReduceConfig
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.trainer.averaging import average_shards
from lightning_zero.integrations.trainer.checks import check_adopted, check_trainable, refuse_callbacks
from lightning_zero.integrations.trainer.finetuning import tell_shards_apart
from lightning_zero.integrations.trainer.inspection import Inspection
from lightning_zero.integrations.trainer.precision import ZeroMixedPrecision, for_shards
from lightning_zero.integrations.trainer.processes import ProcessStrategy, nccl_lets_errors_show
from lightning_zero.integrations.trainer.saving import Saving
from lightning_zero.integrations.trainer.sigterm import Start, ask_on_cpu, note_sigterm
from lightning_zero.integrations.trainer.uncompile import keep_compiled_names, read_compiled_names, take_apart_compiled
from lightning_zero.native.watchdog import Lane

__all__ = ["ZeroStrategy"]

log = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}


class ZeroStrategy(Inspection, Saving, ProcessStrategy):
    """ZeRO-3: parameters, gradients and optimizer state are sharded over all ranks, and the modules a training step
    calls are compiled.

    Use it by name after ``import lightning_zero``: ``Trainer(strategy="zero3_compile")``, or ``"zero3"`` without
    compilation. Precision, clipping, accumulation and the rest are Trainer arguments.

    Args:
        compile: compile the outermost modules that the training step calls.
        compile_backend: ``"inductor"``, or ``"aot_eager"`` to debug.
        compile_dynamic: as in ``torch.compile(dynamic=...)``.
        prefetch: gather weights in groups, ahead of their use; otherwise one by one, where they are used.
        gather_group_mb: at most so many MiB of whole weights in a group.
        prefetch_mb: at most so many MiB of whole weights in flight or in use at once, as far as groups are started more
            than one ahead of their use; by default two groups. More hides more of the transfers where batches are
            small, for memory.
        persist_mb: so many MiB of whole weights, in the dtype they are used in, live from forward to backward on every
            rank instead of being gathered twice: faster, for memory. ``float("inf")`` for all. ``"auto"``: none at
            first, and after a few steps as many as the device has room for; everything is then compiled once more.
        persist_until: ``"backward"``, or ``"step"``: the weights within ``persist_mb`` stay until the optimizer steps,
            so that accumulated micro-batches gather them once. What is changed between micro-batches by writing to
            ``param.data`` counts from the next optimizer step on.
        activation_memory_budget: share, from 0 to 1, of the memory for activations that compiled code would like to
            save for backward; what does not fit is computed again, the cheapest first.
        recompute: decides for single activations: called with an op's name, the bytes of its result and the path of the
            module that it belongs to; True: compute it again in backward, False: save it, None: no opinion.
        reduce_dtype: dtype of gradients on the wire: ``"bf16"``, ``"16"``, ``"32"``; by default ``"bf16"`` for
            ``precision="bf16-mixed"`` and otherwise each parameter's own.
        reduce_bucket_mb: capacity of a reduce bucket in MiB.
        reduce_double_buffer: fill one bucket while the other is reduced.
        reduce_free_buckets: give the buckets' memory back after each backward.
        gather_by: ``"auto"``: between GPUs of one host, with CUDA 13, compiled code with mixed precision copies weights
            out of its peers' memory, which takes no multiprocessors; elsewhere they are all-gathered. ``"copy"``: copy,
            or raise where that cannot be. ``"collective"``: always all-gather.
        reduce_by: likewise for gradients, which are copied into peers' memory, or else reduce-scattered.
        capture_step: replay norm, clipping and the optimizer's step as CUDA graphs: ``"auto"`` where that is possible;
            ``True``, or raise where it is not; ``False`` never.
        capture_graphs: replay forward and backward of compiled code as CUDA graphs, so that the host is not what limits
            small batches: ``"auto"`` where that is possible; ``True``, or raise where it is not; ``False`` never. Their
            memory cannot be used for anything else; evaluation gives it back.
        broadcast_buffers: as in ``DistributedDataParallel``: before the first forward after each optimizer step, rank
            0's buffers (running statistics, codebooks) are sent to all ranks: those of modules in which one changes.
        agreement_timeout_s: a rank that has compiled a graph waits so many seconds for ranks that are not compiling
            before it raises ``RankMismatchError``.
        report_stall_after_s: after so many seconds of waiting every rank says on stderr which rank is missing, where it
            was last and where the others wait; after ``timeout`` the job ends with that text.
        sync_collectives: debugging: wait on the host before and after every collective.
        process_group_backend: by default ``"nccl"`` on CUDA and ``"gloo"`` on the CPU.
        timeout: how long ranks wait for each other.

    Raises:
        ValueError: an argument that makes no sense; the message says which, and what to pass.
    """

    strategy_name = "zero3"

    def __init__(
        self,
        compile: bool = True,
        compile_backend: str = "inductor",
        compile_dynamic: bool | None = None,
        prefetch: bool = True,
        gather_group_mb: float = 128.0,
        prefetch_mb: float | None = None,
        persist_mb: float | str = 0.0,
        persist_until: str = "backward",
        activation_memory_budget: float = 1.0,
        recompute: Callable[[str, int, str], bool | None] | None = None,
        reduce_dtype: str | None = None,
        reduce_bucket_mb: float = 64.0,
        reduce_double_buffer: bool = True,
        reduce_free_buckets: bool = False,
        gather_by: str = "auto",
        reduce_by: str = "auto",
        capture_step: bool | str = "auto",
        capture_graphs: bool | str = "auto",
        broadcast_buffers: bool = True,
        agreement_timeout_s: float = 25.0,
        report_stall_after_s: float = 30.0,
        sync_collectives: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if reduce_dtype is not None and reduce_dtype not in _DTYPES:
            raise ValueError(
                f"reduce_dtype={reduce_dtype!r} is unknown. Choose one of {', '.join(map(repr, _DTYPES))}."
            )
        self._compile = CompileConfig(
            compile,
            compile_backend,
            compile_dynamic,
            prefetch,
            gather_group_mb,
            prefetch_mb=prefetch_mb,
            persist_mb=persist_mb,
            persist_until=persist_until,
            activation_memory_budget=activation_memory_budget,
            recompute=recompute,
        )
        self._reduce_dtype = reduce_dtype
        self._reduce = ReduceConfig(
            bucket_mb=reduce_bucket_mb, double_buffer=reduce_double_buffer, free_buckets=reduce_free_buckets
        )
        # Here, so that a mistake shows before any process is started.
        self._options = EngineConfig(
            sync_collectives=sync_collectives,
            agreement_timeout_s=agreement_timeout_s,
            report_stall_after_s=report_stall_after_s,
            gather_by=gather_by,
            reduce_by=reduce_by,
            capture_step=capture_step,
            capture_graphs=capture_graphs,
            broadcast_buffers=broadcast_buffers,
        )
        self._engine: Engine | None = None
        self._ask_again: Callable[[], None] | None = None
        self._observers: list[GraphObserver] = []
        self._lightning_module_ref: pl.LightningModule | None = None
        self._prepared = False  # in this stage
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            report_stall_after_s=report_stall_after_s,
        )

    # -- what the Trainer asks before anything runs

    @property
    @override
    def precision_plugin(self) -> Precision:
        plugin = self._precision_plugin
        return plugin if plugin is not None else for_shards(Precision(), self._require_engine)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else for_shards(plugin, self._require_engine)

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
        with nccl_lets_errors_show():
            super().setup_environment()
            module = self.lightning_module
            engine = (module is not None and engine_of(module)) or self._require_engine()
        # From here on, so that whatever keeps a rank away in one of the user's hooks is seen by the others.
        engine.cycle.begin_stage()
        self._end_startup()

    @override
    def _waiting(self, what: str) -> AbstractContextManager[None]:
        if self._engine is None:
            return nullcontext()
        self._engine.sharder.access.done_writing()  # whoever comes last may want to read what this rank has written
        return self._engine.watchdog.waiting(what, Lane.WORLD)

    def _ask_for_sigterms(self, start: Start) -> None:
        engine = self._require_engine()
        engine.sharder.access.done_writing()
        engine.executor.collective("the question before each batch whether to stop for a SIGTERM", Lane.CONTROL, start)

    def _require_engine(self) -> Engine:
        if self._engine is None:
            if not torch.distributed.is_initialized():
                raise MisconfigurationException(
                    "The ZeRO-3 strategy was asked for something before it was set up. Call this inside a hook of the "
                    "LightningModule or a callback, while trainer.fit() or another stage is running."
                )
            self._engine = Engine(
                self.root_device, self._config(), self._timeout, skip_modules=(Metric,), say=rank_zero_info
            )
            for observer in self._observers:
                self._engine.observe(observer)
        return self._engine

    def _config(self) -> EngineConfig:
        dtype = self._reduce_dtype
        plugin = self._precision_plugin
        compute = None
        if isinstance(plugin, ZeroMixedPrecision):
            compute = torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
            if dtype is None and plugin.precision == "bf16-mixed":
                dtype = "bf16"
        reduce = replace(self._reduce, dtype=None if dtype is None else _DTYPES[dtype])
        return replace(self._options, reduce=reduce, compile=self._compile, compute_dtype=compute)

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
            self._prepare(trainer)
        engine = self._require_engine()
        engine.executor.begin_stage()
        # Shards must not become inference tensors, which training could not use afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainable(engine, trainer.lightning_module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)
            self._ask_again = ask_on_cpu(trainer, engine.mesh.control_group, self._ask_for_sigterms)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._prepared = False
        super().connect(model)

    def _prepare(self, trainer: pl.Trainer) -> None:
        """Shards the module and what callbacks hold of it: in ``setup``, or before that, when weights are loaded.

        A checkpoint is read before ``setup``, so that ``configure_optimizers`` and ``on_fit_start`` find what it
        brought. ``on_load_checkpoint`` still has the module as the user built it, and may build it anew; its values
        then go straight into shards.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        refuse_callbacks(trainer)
        note_sigterm(trainer)
        module = self.lightning_module
        adopted = engine_of(module)
        if adopted is None:
            self._shard(module)
        else:
            self._adopt(adopted, module)
        self.model_to_device()
        engine = self._require_engine()
        average_shards(trainer, engine, module, self.root_device)
        tell_shards_apart(trainer, engine)
        self.model = module
        self._prepared = True

    def _shard(self, module: pl.LightningModule) -> None:
        engine = self._require_engine()
        compiled = take_apart_compiled(module)
        read_compiled_names(module, compiled)
        self.precision_plugin.convert_module(module)
        # Before evaluation, too: a fit may follow, and synchronised layers evaluate like any others.
        if self._layer_sync is not None:
            with engine.construction():
                self._layer_sync.apply(module)
        try:
            engine.shard(module)
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error
        keep_compiled_names(compiled)

    def _adopt(self, engine: Engine, module: pl.LightningModule) -> None:
        check_adopted(engine, module, self.root_device, self.precision_plugin, self._layer_sync is not None)
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
        with engine.shards_in_sight():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            try:
                engine.optimizers.check(optimizer)
            except UnsupportedError as error:
                raise MisconfigurationException(str(error)) from error
        engine.optimizers.arrange(self.optimizers)

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context(), self._require_engine().train_step():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        self._require_engine().cycle.eval_step()
        yield
        self._require_engine().cycle.after_eval()

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
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        except UnsupportedError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._startup is not None:
            self._startup.fail(exception)
        if self._engine is not None:
            self._engine.watchdog.fail(exception)
            self._engine.cycle.tidy_up()

    @override
    def teardown(self) -> None:
        # The module stays sharded and on its device, so that another stage, save_checkpoint() or state_dict() can
        # follow.
        if self._ask_again is not None:
            self._ask_again()
        if self._engine is not None:
            self._engine.cycle.tidy_up()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine or 'not set up'})"
