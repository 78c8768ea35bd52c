"""Keep the eager first step within the memory limit, and measure what it takes.

The first step saves activations that compiled code recomputes, and its cached blocks do not fit later requests. So the
cache is emptied before it, before its backward and before optimizers make their state, and saved tensors move to the
host while the device lacks memory. Without a limit only a device that is nearly full is handled this way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

from lightning_zero.offload.saved_tensors import SavedTensorOffload
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge, memory_limit

# Share of the free memory that saved tensors may take. The rest is for temporary tensors, which cannot be predicted.
SAVED_SHARE = 0.7
# Multiple of the largest saved tensor that stays free: the backward of a loss in float32 makes that many copies.
LARGEST_COPIES = 5
# Share of the free memory that is filled without reading the device if there is no limit. Most first steps need less.
UNCHECKED_SHARE = 0.25
# Share of the limit that must be cached before the cache is emptied again.
MIN_CACHED_SHARE = 1 / 64


@dataclass(frozen=True)
class FirstStepStats:
    """Measurements of a first step.

    Attributes:
        memory: of the device now; peaks count from the step's beginning.
        took: bytes that the pass took in addition to those that remain, including those on the host meanwhile.
        offloaded: bytes that were on the host meanwhile.
    """

    memory: DeviceMemory
    took: int
    offloaded: int
    seconds: float
    stepped: bool


class _FreeMemory:
    def __init__(self, gauge: MemoryGauge, memory: float | str | None) -> None:
        self._gauge = gauge
        self._stuck = 0  # cached bytes that could not be freed
        self.before = gauge.read()
        self.limit = memory_limit(memory, self.before.total)

    @property
    def free(self) -> float:
        return self.limit - self.before.here

    def excess(self, largest: int) -> float:
        """Return the bytes of saved tensors beyond their share; ``largest``: of one tensor."""
        now = self._gauge.read()
        if now.here + now.cached > self.limit and now.cached > self._stuck + MIN_CACHED_SHARE * self.limit:
            self._gauge.empty()
            self._stuck = self._gauge.read().cached
        if self.free <= 0:
            return math.inf
        return now.here - self.before.here - min(SAVED_SHARE * self.free, self.free - LARGEST_COPIES * largest)


class FirstStep:
    """Controls and measures one first step.

    Attributes:
        before: the device at the beginning; None until then.
        saves: packs the tensors that the forward saves; None except during the step.
    """

    def __init__(self, gauge: MemoryGauge) -> None:
        self._gauge = gauge
        self._limit = 0.0
        self._begun = 0.0
        self._passed: DeviceMemory | None = None  # read before the optimizer stepped
        self._stepped = False
        self.before: DeviceMemory | None = None
        self.saves: SavedTensorOffload | None = None

    def begin(self, memory: float | str | None) -> None:
        """Begin the step, before its forward. ``memory``: the option."""
        self._gauge.start(anew=True)
        self._stepped = False
        self._begun = perf_counter()
        free = _FreeMemory(self._gauge, memory)
        self._limit, self.before, self.saves = free.limit, free.before, self._pack(free)

    def unmeasured_saves(self, memory: float | str | None) -> SavedTensorOffload | None:
        """Return a packer for an eager forward that is not measured; None on a CPU. ``memory``: the option."""
        if not self._gauge.reports_memory:
            return None
        free = _FreeMemory(self._gauge, memory)
        return self._pack(free, UNCHECKED_SHARE * free.free)

    def _pack(self, free: _FreeMemory, unchecked: float = 0.0) -> SavedTensorOffload:
        saves: SavedTensorOffload = SavedTensorOffload(
            self._gauge.device, lambda: free.excess(saves.largest), unchecked_bytes=unchecked
        )
        return saves

    def backward_begins(self) -> None:
        """Empty the cache of the first step's forward; later calls have no effect."""
        if self.saves is not None and self._gauge.read().cached > MIN_CACHED_SHARE * self._limit:
            self._gauge.empty()

    def optimizer_steps(self) -> None:
        """Empty the cache before an optimizer makes its state; repeated calls have no effect.

        State tensors do not fit into the fragments that activations leave, so the device would hold both permanently.
        """
        if self._stepped or self._gauge.is_capturing:
            return
        self._stepped = True
        if self.saves is not None:  # only in the first of several passes
            self._passed = self._gauge.read()
        self._gauge.empty()

    def expect_state_from_host(self) -> None:
        """Empty the cache once more before the next optimizer step, which moves its state back to the device."""
        self._stepped = False

    def end(self) -> FirstStepStats:
        """Return the measurements, before anything else is trained, and reset the peaks."""
        seconds, saves = perf_counter() - self._begun, self.saves
        assert saves is not None
        self.saves = None
        now = self._gauge.read()
        passed = self._passed or now
        self._gauge.start(anew=True)
        took = max(passed.allocated - passed.allocated_now, 0) + saves.nbytes
        return FirstStepStats(now, took, saves.nbytes, seconds, self._stepped)
