"""Gauges of one device: memory taken and left, and time between two points of a training."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

# Share of the device that ``memory="auto"`` leaves free: for larger batches, fragments, and libraries that do not use
# the allocator.
MARGIN = 0.1


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    Attributes:
        total: of the device.
        others: taken now outside of this process's allocator: by other processes, the driver, libraries.
        reserved: peak of the allocator since the gauge was started.
        allocated: peak in tensors since then.
        allocated_now: in tensors, now.
        cached: in the allocator and in no tensor, now.
    """

    total: int
    others: int
    reserved: int
    allocated: int
    allocated_now: int
    cached: int = 0

    @property
    def here(self) -> int:
        """Return the bytes taken now, without the allocator's cache."""
        return self.others + self.allocated_now

    @property
    def taken(self) -> int:
        """Return the bytes taken at the peak by everything on the device, captured graphs and others included."""
        return self.others + self.reserved


def memory_limit(memory: float | str | None, total: float) -> float:
    """Return the bytes that the peak may have. ``memory``: GiB; "auto" and None leave a margin."""
    return min(memory * 2**30, total) if isinstance(memory, int | float) else total * (1 - MARGIN)


class MemoryGauge:
    """Reads the memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def reports_memory(self) -> bool:
        """Return True if the device reports its memory; a CPU does not."""
        return self._device.type != "cpu"

    @property
    def is_capturing(self) -> bool:
        """Return True during a capture on the current stream, when the cache cannot be emptied."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def start(self, anew: bool = False) -> None:
        """Reset the peaks, and torch's own peak statistics.

        Args:
            anew: empty the allocator's cache first, so that later reserved memory was needed later.
        """
        if anew:
            self.empty()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def empty(self) -> None:
        """Empty the allocator's cache. Waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def read(self) -> DeviceMemory:
        """Return the memory now, without waiting for the device."""
        stats = torch.accelerator.memory_stats(self._device)
        free, total = torch.accelerator.get_memory_info(self._device)
        reserved, allocated_now = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
        return DeviceMemory(
            total,
            max(total - free - reserved, 0),
            stats["reserved_bytes.all.peak"],
            stats["allocated_bytes.all.peak"],
            allocated_now,
            reserved - allocated_now,
        )


class DeviceTimer:
    """Measures time on one device. On an accelerator a moment is an event, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def is_done(self, moment: Any) -> bool:
        """Return True if the device has reached ``moment``, so that :meth:`elapsed_s` does not wait."""
        return self._device.type == "cpu" or bool(moment.query())

    def elapsed_s(self, begun: Any, ended: Any) -> float:
        """Return the seconds between two moments. Waits for ``ended``."""
        if self._device.type == "cpu":
            return ended - begun
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3
