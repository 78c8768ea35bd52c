"""Gives back what the allocator caches before that pushes a device past the limit which a user has set.

Blocks of one size that a forward has let go of lie with the allocator while its backward asks for others, and both
count for whoever shares the device. So where a phase of a step begins (forward, backward, an optimizer's step, an
evaluation) and what is cached would pass the limit together with what the phase needs, were none of it used again, it
is given back. Where all fits nothing happens. Nothing can fail by this: the allocator is only asked sooner what it does
by itself where a device is full. Only a number of GiB is held in this way: the margin of ``"auto"`` is there for
fragments.

Torch has a setting that asks in each allocation (``garbage_collection_threshold``, behind a memory fraction). It is not
used: it frees amid captures of CUDA graphs, users' and Inductor's, which invalidates them
(https://github.com/pytorch/pytorch/issues/159594); it holds for the whole process; and at run time it can be set only
together with all other settings of the allocator, which torch 2.11 does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_zero.config.text import format_gib
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge, memory_limit

__all__ = ["AllocatorCacheLimit", "exceeds_limit"]

# Of the limit: so much has to come together before the allocator is asked, which waits for the device.
WORTH = 1 / 64
# After so many steps in which nothing was in the way, only one in as many is looked at: reading a device takes time.
PATIENCE = 8
# A user is told once so much has been given back that it is no matter of the first steps.
TOLD = 20


def exceeds_limit(memory: DeviceMemory, limit: float, most: float, useless: int) -> bool:
    """Whether what is cached could pass the limit, and would come free if that is asked for.

    Args:
        most: bytes in tensors at the peak of a step, where that is known.
        useless: of what is cached, bytes that could not be given back the last time: those of captured graphs, and
            what lies between tensors.
    """
    return memory.cached - useless > WORTH * limit and memory.others + most + memory.cached > limit


class AllocatorCacheLimit:
    """Of one engine.

    Args:
        gauge: reads this rank's device.
        report: shows a line to the user.

    Attributes:
        given_back: how many times.
    """

    def __init__(self, gauge: MemoryGauge, report: Callable[[str], None]) -> None:
        self._gauge = gauge
        self._report = report
        self._compiled = 0
        self._stepped = self._evaluates = self._told = False
        self.given_back = 0
        self._forget()

    def _forget(self) -> None:
        """Other code runs from now on, of which nobody knows what it takes."""
        self._steps = self._idle = self._often = 0
        self._most = 0  # bytes in tensors, at any peak
        self._useless = 0

    def forward_begins(self, memory: float | str | None, compiled: int) -> None:
        """Before each forward of a training step, once its options hold.

        Args:
            memory: the option.
            compiled: how much has been compiled so far.
        """
        if compiled != self._compiled:
            self._compiled = compiled
            self._forget()
        elif self._stepped:
            self._steps += 1
            self._idle += 1
        self._stepped = self._evaluates = False
        self.phase_begins(memory, compiled)

    def optimizer_steps(self, memory: float | str | None, compiled: int) -> None:
        """Before an optimizer steps. Harmless when repeated."""
        if not self._stepped:
            self.phase_begins(memory, compiled)
        self._stepped = True

    def evaluates(self, memory: float | str | None, compiled: int) -> None:
        """Before each forward of an evaluation. What training has left is in its way; what its own batches leave, the
        next one takes."""
        if not self._evaluates:
            self.phase_begins(memory, compiled)
        self._evaluates = True

    def phase_begins(self, memory: float | str | None, compiled: int) -> None:
        """Before anything else that takes memory; the same arguments."""
        rests = self._idle >= PATIENCE and self._steps % PATIENCE
        if not isinstance(memory, int | float) or not self._gauge.reports_memory or rests or self._gauge.is_capturing:
            return
        now, known = self._gauge.read(), compiled == self._compiled and self._steps > 0
        self._most = max(self._most, now.allocated)
        self._useless = min(self._useless, now.cached)
        most = self._most if known else math.inf
        if not exceeds_limit(now, memory_limit(memory, now.total), most, self._useless):
            return
        self._gauge.empty()
        self._useless, self._idle = self._gauge.read().cached, 0
        self.given_back += 1
        self._often += known
        if self._often == TOLD and not self._told:
            self._told = True
            self._report(
                f"memory={memory!r} is held by giving back what torch's allocator caches, of late "
                f"{format_gib(now.cached - self._useless)} GiB, before passes and steps that it would push past the limit. "
                "The device is waited for each time: a larger limit is faster, and so are passes that are replayed."
            )
