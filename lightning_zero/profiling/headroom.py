"""How much memory of a device training has taken, and how much is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["MARGIN", "DeviceMemory", "MemoryGauge", "memory_limit"]

# Of the whole device: batches that need more than those that were measured, fragments, and libraries that allocate past
# the allocator.
MARGIN = 0.1


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    Attributes:
        total: of the device.
        others: taken now by anything but this process's allocator: other processes, the driver, libraries.
        reserved: by the allocator, at the peak since the gauge was started.
        allocated: in tensors, at that peak.
        resident: in tensors, now.
        cached: by the allocator, now, and in no tensor.
    """

    total: int
    others: int
    reserved: int
    allocated: int
    resident: int
    cached: int = 0

    @property
    def here(self) -> int:
        """Of the whole device, now, but for what the allocator can give back."""
        return self.others + self.resident

    @property
    def taken(self) -> int:
        """Of the whole device, at the peak: the allocator's pools and those of captured graphs, contexts, libraries,
        memory that peers read, and other processes."""
        return self.others + self.reserved


def memory_limit(memory: float | str | None, total: float) -> float:
    """Bytes that a device's peak may have: so many GiB, as far as there are so many; by default all but the margin."""
    return min(memory * 2**30, total) if isinstance(memory, int | float) else total * (1 - MARGIN)


class MemoryGauge:
    """Reads the allocator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0, 0  # peaks until the last lap: reserved, allocated

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def reports_memory(self) -> bool:
        """Whether the device says how much memory it has; a CPU does not."""
        return self._device.type != "cpu"

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream: nothing can be given back meanwhile."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def start(self, anew: bool = False) -> None:
        """Peaks count from now on. ``anew``: what the allocator has cached from before is given back first, so that
        what it reserves later was needed later. Torch's own peak statistics are reset."""
        if anew:
            self.empty()
        self._before = 0, 0
        torch.accelerator.reset_peak_memory_stats(self._device)

    def empty(self) -> None:
        """What the allocator has cached, and no tensor lies in, is given back. Waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def read(self) -> DeviceMemory:
        """Does not wait for the device."""
        now, (reserved, allocated) = self._read(), self._before
        return replace(now, reserved=max(now.reserved, reserved), allocated=max(now.allocated, allocated))

    def lap(self) -> DeviceMemory:
        """The same, with peaks since the last lap, which begins anew. Torch's own peak statistics are reset."""
        now, whole = self._read(), self.read()
        self._before = whole.reserved, whole.allocated
        torch.accelerator.reset_peak_memory_stats(self._device)
        return now

    def _read(self) -> DeviceMemory:
        stats = torch.accelerator.memory_stats(self._device)
        free, total = torch.accelerator.get_memory_info(self._device)
        reserved, resident = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
        return DeviceMemory(
            total,
            max(total - free - reserved, 0),
            stats["reserved_bytes.all.peak"],
            stats["allocated_bytes.all.peak"],
            resident,
            reserved - resident,
        )
