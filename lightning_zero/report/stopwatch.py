"""Measures batches of a training: time and memory, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.profiling.moments import Moments
from lightning_zero.report.correction import Measured

__all__ = ["Stopwatch"]

BATCHES = 5


@dataclass
class _Batch:
    """Marks are moments, of the host or of the device."""

    begun: Any
    gathered: int
    resident: int | None
    backwards: int = 0
    passed: Any = None
    ended: Any = None
    peak: int | None = None


class Stopwatch:
    """Protocol, for each batch: :meth:`begin`, :meth:`backward_ends` after each backward, and :meth:`end`.

    Args:
        device: where the training runs. Where it is an accelerator, times are between events on its current stream.
        gathered: counts bytes of gathered weights.
        gauge: reads the device's memory.
    """

    def __init__(self, device: torch.device, gathered: Callable[[], int], gauge: MemoryGauge | None = None) -> None:
        self._moments = Moments(device)
        self._gathered = gathered
        self._gauge = gauge or MemoryGauge(device)
        self._batches: list[_Batch] = []
        self._running: _Batch | None = None

    def forget(self) -> None:
        """Begins anew; the batch that runs does not count."""
        self._batches.clear()
        self._running = None

    @property
    def done(self) -> bool:
        return len(self._batches) >= BATCHES

    def begin(self) -> None:
        resident = None
        if self._gauge.exists:
            self._gauge.start()
            resident = self._gauge.read().resident
        self._running = _Batch(self._moments.now(), self._gathered(), resident)

    def backward_ends(self) -> None:
        batch = self._running
        if batch is not None:
            batch.backwards += 1
            batch.passed = self._moments.now()
            batch.peak = self._gauge.read().allocated if self._gauge.exists else None

    def end(self) -> None:
        batch, self._running = self._running, None
        if batch is not None:
            batch.ended = self._moments.now()
            batch.gathered = self._gathered() - batch.gathered
            self._batches.append(batch)

    def measured(self) -> Measured:
        """Of the batches so far, of which there must be some. Waits for the device."""
        single = all(batch.backwards == 1 for batch in self._batches)
        highest = max(self._batches, key=lambda batch: (batch.peak or 0) - (batch.resident or 0))
        return Measured(
            median(self._moments.between(batch.begun, batch.passed) for batch in self._batches) if single else None,
            median(self._moments.between(batch.begun, batch.ended) for batch in self._batches),
            int(median(batch.gathered for batch in self._batches)),
            highest.peak,
            highest.resident,
        )
