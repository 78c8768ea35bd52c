"""Log the time, traffic and memory of training steps to any logger.

The host never waits for the device: times are between events. A window of steps is logged at a later step, once the
device has reached its end, under the number of its own last step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ThroughputMonitor
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.console import show_info
from lightning_zero.integrations.trainer.pass_schedule import zero_strategy
from lightning_zero.profiling.devices import PeakFlops, find_peak_flops
from lightning_zero.profiling.node_costs import FlopCount
from lightning_zero.report.step_metrics import BatchTotals, EngineCounters, StepWindow, fp8_metrics, window_metrics

SizeOf = Callable[[Any], int]


class CommMonitor(Callback):
    """Log means over a window of optimizer steps:

    * ``throughput/step_ms``, ``throughput/samples_per_sec`` and, with a ``length_fn``, ``throughput/tokens_per_sec`` of
      all ranks together, without validation between the steps;
    * ``throughput/tflops_per_device``, and ``throughput/mfu``: its share of the device's peak in dense products of the
      compute dtype. Operations are the module's ``flops_per_batch``, as for Lightning's ``ThroughputMonitor``.
      Without that they are counted in the eager first step on rank 0, with recomputed ones counted twice, and scaled
      by the size of batches. One line names the peak;
    * ``comm/gathered_mib``, ``comm/reduced_mib``: of unsharded weights and gradient buckets, per step and rank;
    * ``comm/exposed_ms_estimated``: time per step in which compute waits for transfers. It cannot be measured in a
      CUDA graph, so it is estimated from the plan and the measured speeds of device and links, corrected by the
      measured time of a pass. It is missing on CPUs, and if a pass does not run each of its graphs once;
    * ``memory/peak_mib``, ``memory/reserved_mib``: of the device's allocator, since torch's own statistics were last
      reset; and ``memory/master_shard_mib``, ``gradient``, ``compute_shard``, ``optimizer_state``,
      ``optimizer_state_on_host``, ``activations_on_host``, ``captures``, ``peers`` (symmetric memory, outside of the
      allocator) and so on, by role;
    * ``replays/forward_backward``, ``replays/optimizer_step``: 1 if CUDA graphs were replayed in these steps, else 0,
      and one line gives the reason;
    * ``fp8/LAYER/MATRIX_amax``, ``_underflow`` and ``_overflow`` of fp8 matrices, with the option ``fp8_health_every``,
      and ``fp8/steps``: the optimizer steps that they cover. The last steps are logged when training ends, also by an
      exception.

    Steps in which something was compiled do not count in times and rates. The numbers are rank 0's.

    Args:
        every_n_steps: Optimizer steps in a window; by default the Trainer's ``log_every_n_steps``.
        batch_size_fn: Returns the number of samples in a batch. By default that of a ``ThroughputMonitor`` among the
            callbacks, or Lightning's guess.
        length_fn: Returns the number of tokens in a batch. By default that of a ``ThroughputMonitor``, or none.
        peak_flops: Peak of one device in FLOP/s; by default looked up by its name.

    Attributes:
        values: Metrics that were logged last, by name.

    Raises:
        MisconfigurationException: ``every_n_steps`` is not positive, or (in ``setup``) the strategy is no
            ``ZeroStrategy``.

    Examples:
        >>> from lightning_zero import CommMonitor
        >>> monitor = CommMonitor(every_n_steps=10, length_fn=lambda batch: batch[0].numel())
        >>> monitor.values  # pass the monitor as Trainer(callbacks=[monitor]); later it has the latest metrics
        {}
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        batch_size_fn: SizeOf | None = None,
        length_fn: SizeOf | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise MisconfigurationException(f"CommMonitor(every_n_steps={every_n_steps}): pass at least 1.")
        self._every = every_n_steps
        self._size_of, self._length_of = batch_size_fn, length_fn
        self._peak = None if peak_flops is None else PeakFlops(peak_flops, "the given peak_flops")
        self._engine: Engine | None = None  # on rank 0 during training
        self._window: StepWindow | None = None
        self._ended: deque[tuple[int, int, StepWindow]] = deque()  # first step, last step; not logged yet
        self._first_step = 0
        self._count: FlopCount | None = None  # during the first step
        self._flops: tuple[float, int] | None = None  # of a batch of this size
        self._reported: set[str] = set()
        self.values: dict[str, float] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zero_strategy(trainer, "observe_graphs", "CommMonitor looks at the engine of ZeroStrategy")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for other in (callback for callback in callbacks if isinstance(callback, ThroughputMonitor)):
            self._size_of = self._size_of or other.batch_size_fn
            self._length_of = self._length_of or other.length_fn

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._engine = engine_of(pl_module) if trainer.is_global_zero else None
        self._ended.clear()
        self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        engine = self._engine
        if engine is not None:
            self._first_step = trainer.global_step
            self._window = StepWindow(engine.device, lambda: _counts(engine, trainer.optimizers))

    # -- a batch

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        if self._engine is None or self._window is None:
            return
        eager = self._engine.session.is_discovering or not self._engine.config.compiled.enabled
        if self._flops is None and eager and not hasattr(pl_module, "flops_per_batch"):
            self._count = FlopCount()
            self._count.__enter__()
        self._window.pass_begins()

    @override
    def on_after_backward(self, *args: Any) -> None:
        if self._window is not None:
            self._window.pass_ends()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        counted = self._stop_counting()
        if self._window is None:
            return
        self._add(self._window.tally, pl_module, batch, counted)
        step, every = trainer.global_step, self._every or getattr(trainer, "log_every_n_steps", 0) or 1
        if step > self._first_step and step % every == 0:
            self._window.end()
            self._ended.append((self._first_step, step, self._window))
            self._begin(trainer)
        while self._ended and self._ended[0][-1].over:
            self._log(trainer, *self._ended.popleft())

    def _add(self, tally: BatchTotals, module: pl.LightningModule, batch: Any, counted: int | None) -> None:
        size = self._size_of(batch) if self._size_of else extract_batch_size(batch)
        length = self._length_of(batch) if self._length_of else 0
        tally.batches += 1
        tally.samples += size
        tally.lengths += length
        if counted:
            self._flops = float(counted), length or size
        given = getattr(module, "flops_per_batch", None)
        if given is not None:
            tally.flops += given
        elif self._flops is not None and self._flops[1]:
            tally.flops += self._flops[0] * (length or size) / self._flops[1]

    def _stop_counting(self) -> int | None:
        count, self._count = self._count, None
        if count is None:
            return None
        count.__exit__(None, None, None)
        return count.total

    # -- interruptions

    @override
    def on_validation_start(self, *args: Any) -> None:
        if self._window is not None:
            self._window.pause()

    @override
    def on_validation_end(self, *args: Any) -> None:
        if self._window is not None:
            self._window.resume()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        while self._ended:
            self._log(trainer, *self._ended.popleft())  # this waits for the device
        self._log_last_fp8_steps(trainer)
        self._engine = self._window = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_counting()
        self._ended.clear()
        self._log_last_fp8_steps(trainer)
        self._engine = self._window = None

    # -- logging

    def _log_last_fp8_steps(self, trainer: pl.Trainer) -> None:
        health = None if self._engine is None else self._engine.fp8_health
        if health is not None:
            health.finish(lambda: self._send(trainer, fp8_metrics(health), trainer.global_step))

    def _log(self, trainer: pl.Trainer, first: int, last: int, window: StepWindow) -> None:
        engine = self._engine
        assert engine is not None
        self._find_peak(engine, window)
        values, why = window_metrics(engine, trainer.optimizers, window, last - first, self._peak)
        for line in why:
            self._report(line)
        self.values = values
        self._send(trainer, values, last)

    def _send(self, trainer: pl.Trainer, values: dict[str, float], last: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=last - 1)  # the number under which Lightning logs that step

    def _find_peak(self, engine: Engine, window: StepWindow) -> None:
        if not window.tally.flops:
            self._report(
                "CommMonitor logs no MFU: no step ran eagerly in which operations could be counted. Give the "
                "LightningModule a flops_per_batch."
            )
            return
        if self._peak is None:
            self._peak = _peak_of(engine)
        if self._peak is None:
            self._report(
                "CommMonitor logs no MFU: the peak of this device is not known. Pass CommMonitor(peak_flops=...)."
            )
        else:
            per_batch = window.tally.flops / window.tally.batches
            self._report(
                f"CommMonitor: MFU is a share of {self._peak.what}.", f" A batch takes {per_batch / 1e9:.4g} GFLOP."
            )

    def _report(self, line: str, suffix: str = "") -> None:
        """Report a line once; ``suffix`` may differ."""
        if line not in self._reported:
            self._reported.add(line)
            show_info(line + suffix)


def _counts(engine: Engine, optimizers: list[torch.optim.Optimizer]) -> EngineCounters:
    counters = engine.executor.counters()
    return EngineCounters(
        counters.get("gather_bytes", 0),
        counters.get("reduce_bytes", 0),
        counters.get("replayed_graphs", 0),
        sum(engine.optimizers.stepper(optimizer).replays for optimizer in optimizers),
        engine.session.progress.compiled,
    )


def _peak_of(engine: Engine) -> PeakFlops | None:
    if engine.device.type != "cuda" or engine.module is None:
        return None
    dtypes = [param.dtype for param in engine.module.parameters() if param.dtype.is_floating_point]
    dtype = engine.config.compute_dtype or (dtypes[0] if dtypes else torch.float32)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return find_peak_flops(torch.cuda.get_device_name(engine.device), dtype, tf32)
