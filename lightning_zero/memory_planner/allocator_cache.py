"""Empty the allocator's cache before it pushes the device past a user's limit.

Cached blocks of one size do not serve requests of another, and both count for other processes on the device. Torch's
``garbage_collection_threshold`` is not used: it frees during captures of CUDA graphs and invalidates them
(https://github.com/pytorch/pytorch/issues/159594), and it applies to the whole process. ``memory="auto"`` leaves a
margin for fragmentation, so only a number of GiB is held this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_zero.config.text import format_bytes
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge, memory_limit

# Share of the limit that must be cached before the cache is emptied, which synchronizes the device.
MIN_CACHED_SHARE = 1 / 64
# After this many steps without a release only every eighth step is checked, because reading the device takes time.
IDLE_STEPS = 8
# Releases outside of first steps after which the user is informed.
MANY_RELEASES = 20


def exceeds_limit(memory: DeviceMemory, limit: float, most: float, stuck: int) -> bool:
    """Return True if cached memory could exceed the limit and emptying the cache would help.

    Args:
        most: peak bytes in tensors of a step, or infinity if unknown.
        stuck: cached bytes that the last release could not free: captured graphs and fragments.
    """
    return memory.cached - stuck > MIN_CACHED_SHARE * limit and memory.others + most + memory.cached > limit


class AllocatorCacheLimit:
    """Releases cached memory at the beginning of each phase of a step, if it could exceed the limit.

    All methods take the option ``memory`` and a count of compiled code, whose change invalidates the known peak.

    Attributes:
        releases: number of releases so far.
    """

    def __init__(self, gauge: MemoryGauge, report: Callable[[str], None]) -> None:
        self._gauge = gauge
        self._report = report
        self._compiled = 0
        self._stepped = self._evaluates = self._reported = False
        self.releases = 0
        self._forget()

    def _forget(self) -> None:
        self._steps = self._idle = self._often = 0
        self._most = 0  # peak bytes in tensors
        self._stuck = 0

    def forward_begins(self, memory: float | str | None, compiled: int) -> None:
        """Call before each forward of a training step."""
        if compiled != self._compiled:
            self._compiled = compiled
            self._forget()
        elif self._stepped:
            self._steps += 1
            self._idle += 1
        self._stepped = self._evaluates = False
        self.phase_begins(memory, compiled)

    def optimizer_steps(self, memory: float | str | None, compiled: int) -> None:
        """Call before an optimizer steps; repeated calls have no effect."""
        if not self._stepped:
            self.phase_begins(memory, compiled)
        self._stepped = True

    def evaluates(self, memory: float | str | None, compiled: int) -> None:
        """Call before each forward of an evaluation; only the first one releases what training has cached."""
        if not self._evaluates:
            self.phase_begins(memory, compiled)
        self._evaluates = True

    def phase_begins(self, memory: float | str | None, compiled: int) -> None:
        """Call before any other phase that allocates."""
        rests = self._idle >= IDLE_STEPS and self._steps % IDLE_STEPS
        if not isinstance(memory, int | float) or not self._gauge.reports_memory or rests or self._gauge.is_capturing:
            return
        now, known = self._gauge.read(), compiled == self._compiled and self._steps > 0
        self._most = max(self._most, now.allocated)
        self._stuck = min(self._stuck, now.cached)
        most = self._most if known else math.inf
        if not exceeds_limit(now, memory_limit(memory, now.total), most, self._stuck):
            return
        self._gauge.empty()
        self._stuck, self._idle = self._gauge.read().cached, 0
        self.releases += 1
        self._often += known
        if self._often == MANY_RELEASES and not self._reported:
            self._reported = True
            self._report(
                f"memory={memory!r} is held by emptying the cache of torch's allocator, most recently "
                f"{format_bytes(now.cached - self._stuck)}, before passes and steps that would exceed it. Each time "
                "waits for the device: a larger limit is faster, and so are passes that are replayed as CUDA graphs."
            )
