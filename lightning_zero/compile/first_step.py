"""Holds the first step within a limit of memory.

It runs eagerly, to show what to compile, and nothing has been planned for it but what is known without activations. It
saves what compiled code computes again; and what it has let go of, the allocator keeps for its next tensors of those
sizes, while backward needs others, and the optimizer is about to make its state. So what setup has left with the
allocator is given back before it, what it saves goes to the host while there would be too little left, and what it has
let go of is given back before backward and before an optimizer steps.

Without a limit it must not be what ends a training whose compiled steps would fit: what it saves goes to the host where
the device would soon be full, and before an optimizer steps memory is given back likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

from lightning_zero.offload.saved_tensors import SavedTensorOffload
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge, memory_limit

__all__ = ["FirstStep", "FirstStepStats"]

# Of what is free when it begins, so much may be taken by what is saved for backward: the rest is for what lives for a
# moment, of which nobody is told before it is asked for.
SAVED_SHARE = 0.7
# And so many times the largest thing that is saved stay free: the backward of a loss, in float32, makes as many of it.
AT_ONCE = 5
# Without a limit, so much of what is free stays as autograd saved it, and nobody reads the device meanwhile: most first
# steps end before.
UNWATCHED_SHARE = 0.25
# Of the limit: so much has to come together before the allocator is asked once more to give back what it keeps.
WORTH = 1 / 64


@dataclass(frozen=True)
class FirstStepStats:
    """What a first step has shown.

    Attributes:
        memory: of the device, now; peaks count from its beginning.
        took: bytes that its pass took beside what was there when it was over; with what was on the host meanwhile.
        left: bytes that were.
        seconds: since it began.
        stepped: an optimizer has stepped.
    """

    memory: DeviceMemory
    took: int
    left: int
    seconds: float
    stepped: bool


class _Room:
    """On a device, beside what is there now.

    Attributes:
        before: what is there.
        limit: bytes that the device may hold, as the option ``memory`` says.
    """

    def __init__(self, gauge: MemoryGauge, memory: float | str | None) -> None:
        self._gauge = gauge
        self._useless = 0  # bytes that the allocator could not give back
        self.before = gauge.read()
        self.limit = memory_limit(memory, self.before.total)

    @property
    def free(self) -> float:
        """Bytes that there were."""
        return self.limit - self.before.here

    def excess(self, largest: int) -> float:
        """Bytes by which more has been saved since than should be, of which no single thing was larger. What the
        allocator keeps is given back where the device would hold more than it may."""
        now = self._gauge.read()
        if now.here + now.cached > self.limit and now.cached > self._useless + WORTH * self.limit:
            self._gauge.empty()
            self._useless = self._gauge.read().cached
        if self.free <= 0:
            return math.inf
        return now.here - self.before.here - min(SAVED_SHARE * self.free, self.free - AT_ONCE * largest)


class FirstStep:
    """Of one engine.

    Args:
        gauge: reads this rank's device.

    Attributes:
        before: the device, when it began; None until then.
        saves: packs what its forward saves; None before it begins, and once it is over.
    """

    def __init__(self, gauge: MemoryGauge) -> None:
        self._gauge = gauge
        self._limit = 0.0
        self._begun = 0.0
        self._passed: DeviceMemory | None = None  # when an optimizer was about to step
        self._stepped = False
        self.before: DeviceMemory | None = None
        self.saves: SavedTensorOffload | None = None

    def begin(self, memory: float | str | None) -> None:
        """Before its forward, within what the option ``memory`` says."""
        self._gauge.start(anew=True)
        self._stepped = False
        self._begun = perf_counter()
        room = _Room(self._gauge, memory)
        self._limit, self.before, self.saves = room.limit, room.before, self._saves(room)

    def unmeasured_saves(self, memory: float | str | None) -> SavedTensorOffload | None:
        """What packs what an eager forward saves that only shows what to compile, and of which nothing else is wanted;
        None on a CPU.

        Args:
            memory: the option.
        """
        if not self._gauge.reports_memory:
            return None
        room = _Room(self._gauge, memory)
        return self._saves(room, UNWATCHED_SHARE * room.free)

    def _saves(self, room: _Room, unchecked_bytes: float = 0.0) -> SavedTensorOffload:
        saves: SavedTensorOffload = SavedTensorOffload(
            self._gauge.device, lambda: room.excess(saves.largest), unchecked_bytes=unchecked_bytes
        )
        return saves

    def backward_begins(self) -> None:
        """A forward is over, and what it has let go of has other sizes than what comes. Harmless where it is not the
        first step's."""
        if self.saves is not None and self._gauge.read().cached > WORTH * self._limit:
            self._gauge.empty()

    def optimizer_steps(self) -> None:
        """State is about to be made, which would not find room in what activations have left, piece by piece: the
        device would hold both from then on, limit or not. Harmless when repeated."""
        if self._stepped or self._gauge.is_capturing:
            return
        self._stepped = True
        if self.saves is not None:  # not the later one of several passes
            self._passed = self._gauge.read()
        self._gauge.empty()

    def expect_state_from_host(self) -> None:
        """From the host, in the next step of its optimizer: it finds no more room there than when it was made."""
        self._stepped = False

    def end(self) -> FirstStepStats:
        """Before anything else is trained: what it has taken. Peaks count anew."""
        seconds, saves = perf_counter() - self._begun, self.saves
        assert saves is not None
        self.saves = None
        now = self._gauge.read()
        passed = self._passed or now
        self._gauge.start(anew=True)
        took = max(passed.allocated - passed.resident, 0) + saves.nbytes
        return FirstStepStats(now, took, saves.nbytes, seconds, self._stepped)
