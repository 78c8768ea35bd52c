"""Callbacks that measure a training without slowing it down."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero.integrations.trainer.sigterm import ask_on_cpu
from lightning_zero.report.readings import memory_by_role

__all__ = ["Clock", "Start"]


class Clock(pl.Callback):
    """From the end of one optimizer step on the device to the end of the next. Nothing waits for the device here, as
    nothing does in a user's training."""

    def __init__(self, warm: int, ask: bool = False) -> None:
        self.warm, self.ask, self.begin, self.steady_after = warm, ask, 0.0, 0.0
        self.marks: list[Any] = []
        self.told: list[float] = []  # when the host had queued each
        self.loss: Any = None
        self.profiler: Any = None
        self.peak: float | None = None
        self.reserved: float | None = None
        self.device: float | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.ask:
            ask_on_cpu(trainer, torch.distributed.new_group(backend="gloo"))
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: object) -> None:
        if trainer.global_step == len(self.marks):
            return
        self.marks.append(self.mark())
        self.loss = outputs["loss"]
        if len(self.marks) == self.warm:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.steady_after = time.perf_counter() - self.begin
        self.told.append(time.perf_counter())
        if self.profiler is not None:
            self.profiler.step()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if torch.cuda.is_available():
            # Memory that all ranks can read is not the allocator's, and what CUDA graphs use between kernels is free to
            # it, but to nobody else.
            peers = getattr(trainer.strategy, "peer_bytes", 0)
            self.peak = round((torch.cuda.max_memory_allocated() + of_graphs() + peers) / 2**30, 2)
            self.reserved = round((torch.cuda.max_memory_reserved() + peers) / 2**30, 2)
            # Now: when `fit` returns, strategies have given back what they please.
            free, total = torch.cuda.mem_get_info()
            self.device = round((total - free) / 2**30, 2)

    @staticmethod
    def mark() -> torch.cuda.Event | float:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(begin: Any, end: Any) -> float:
        """Milliseconds from one mark to another; the device must have passed both."""
        return float(begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else 1e3 * (end - begin))

    def milliseconds(self) -> list[float]:
        """Of the steps after warm-up; the first one of them, before which the device was waited for, left out."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steady = self.marks[self.warm :]
        return [self.between(a, b) for a, b in zip(steady, steady[1:], strict=False)]

    def leads(self) -> list[float]:
        """Milliseconds by which the device came later to the end of each such step than the host did, which queues it:
        where that does not grow to more than a step, the device waits for the host, and not the other way round."""
        if not torch.cuda.is_available() or len(self.marks) <= self.warm:
            return []
        torch.cuda.synchronize()
        origin, begun = self.marks[self.warm - 1], self.told[self.warm - 1]  # the host had waited for the device
        after = zip(self.marks[self.warm :], self.told[self.warm :], strict=True)
        return [origin.elapsed_time(mark) - 1e3 * (told - begun) for mark, told in after]


def of_graphs() -> int:
    """Bytes that belong to CUDA graphs, as far as no tensor holds them."""
    if not torch.cuda.is_available():
        return 0
    segments = (s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


class Start(pl.Callback):
    """When a step, by default the tenth, has ended on the device; what an engine counted, and its memory by role."""

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
