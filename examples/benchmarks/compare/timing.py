"""Callbacks that measure a training without slowing it down, and the end of a process that has printed the results."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch

from lightning_zero.integrations.trainer.signals import check_stop_on_cpu
from lightning_zero.report.engine_report import memory_by_role

__all__ = ["Clock", "Start", "bytes_of_graphs", "exit_without_cleanup", "outer_deciles"]


def outer_deciles(times: Sequence[float], digits: int) -> list[float]:
    """Return the 10th and the 90th percentile of times."""
    deciles = statistics.quantiles(times, n=10)
    return [round(deciles[0], digits), round(deciles[-1], digits)]


class Clock(pl.Callback):
    """Measure the time from the end of one optimizer step on the device to the end of the next.

    It never waits for the device during a training, as a user's training does not.
    """

    def __init__(self, warm: int, ask: bool = False) -> None:
        self.warm, self.ask, self.begin, self.steady_after = warm, ask, 0.0, 0.0
        self.marks: list[Any] = []
        self.queued_at: list[float] = []  # when the host had queued each step, in seconds
        self.loss: Any = None
        self.profiler: Any = None
        self.peak: float | None = None
        self.first_peak: float | None = None  # GiB, until the end of the first optimizer step
        self.reserved: float | None = None
        self.device: float | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.ask:
            check_stop_on_cpu(trainer, torch.distributed.new_group(backend="gloo"))
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: object) -> None:
        if trainer.global_step == len(self.marks):
            return
        self.marks.append(self.mark())
        self.loss = outputs["loss"]
        if len(self.marks) == 1 and torch.cuda.is_available():
            self.first_peak = self._peak(trainer)
        if len(self.marks) == self.warm:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.steady_after = time.perf_counter() - self.begin
        self.queued_at.append(time.perf_counter())
        if self.profiler is not None:
            self.profiler.step()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if torch.cuda.is_available():
            self.peak = self._peak(trainer)
            peers = getattr(trainer.strategy, "peer_bytes", 0)
            self.reserved = round((torch.cuda.max_memory_reserved() + peers) / 2**30, 2)
            # Here, because strategies free memory before `fit` returns.
            free, total = torch.cuda.mem_get_info()
            self.device = round((total - free) / 2**30, 2)

    @staticmethod
    def _peak(trainer: pl.Trainer) -> float:
        """Return the peak in GiB.

        The allocator does not count memory that all ranks can read, and counts memory of CUDA graphs as free.
        """
        peers = getattr(trainer.strategy, "peer_bytes", 0)
        return round((torch.cuda.max_memory_allocated() + bytes_of_graphs() + peers) / 2**30, 2)

    @staticmethod
    def mark() -> torch.cuda.Event | float:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(begin: Any, end: Any) -> float:
        """Return the milliseconds from one mark to another. The device must have passed both."""
        return float(begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else 1e3 * (end - begin))

    def milliseconds(self) -> list[float]:
        """Return the time of each step after warm-up, without the first, before which the host waits for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steady = self.marks[self.warm :]
        return [self.between(a, b) for a, b in zip(steady, steady[1:], strict=False)]

    def leads(self) -> list[float]:
        """Return by how many milliseconds the host is ahead of the device at the end of each step after warm-up.

        If that stays below the time of one step, the device waits for the host.
        """
        if not torch.cuda.is_available() or len(self.marks) <= self.warm:
            return []
        torch.cuda.synchronize()
        origin, begun = self.marks[self.warm - 1], self.queued_at[self.warm - 1]  # the host had waited for the device
        after = zip(self.marks[self.warm :], self.queued_at[self.warm :], strict=True)
        return [origin.elapsed_time(mark) - 1e3 * (queued - begun) for mark, queued in after]


def bytes_of_graphs() -> int:
    """Return the bytes that belong to CUDA graphs and to no tensor."""
    if not torch.cuda.is_available():
        return 0
    segments = (s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


class Start(pl.Callback):
    """Measure the seconds until a step, by default the tenth, has ended. Read counters and memory by role."""

    def __init__(self, step: int = 10) -> None:
        self.step, self.begin = step, time.perf_counter()
        self.seconds = 0.0
        self.counters: dict[str, int] = {}
        self.roles: dict[str, float] = {}  # GiB, at the end

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.seconds:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.begin

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        engine = getattr(trainer.strategy, "_engine", None)
        if engine is not None:
            names = ("replayed_graphs", "copied_weights", "eager_gathers", "gathers")
            counters = engine.executor.counters()
            self.counters = {name: counters[name] for name in names if name in counters}
            roles = memory_by_role(engine, trainer.optimizers)
            self.roles = {role: round(count / 2**30, 2) for role, count in roles.items()}


def exit_without_cleanup() -> NoReturn:
    """End this process at once.

    Data workers, compilers, captured graphs and process groups take seconds to end, in each row of a table.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
