"""Some buffers on the device, through which much more passes that lies on the host.

While one buffer is computed in, those of the loads before it are on their way back to the host, and those of the loads
behind it on their way in. A :class:`RingPass` has three parts:

    ``ahead``               the first loads, as many as there are buffers, start to come: the earlier, the better
    ``open``, ``close``     by turns, for each load: what is in its buffer may be changed; then it leaves, and the load
                            that is next in the same buffer comes. May be captured in a CUDA graph, between ``join``
                            and ``rejoin``
    ``leave``               the last loads, which nobody waits for

Three waits keep copies and compute apart, beside compute's own for what it is about to use:

    a copy in waits for compute         whatever compute was given before the pass comes first
    a copy in waits for a copy out      of the load that had the buffer before, and of the last time that this load
                                        left; behind a pass of other loads, for all copies out
    a copy out waits for compute        which writes what is to be copied

Copies of one direction keep their order, so that a wait for the last one is a wait for all. Loads that come ahead do so
in the order in which their buffers get free: copies go both ways at once, however many buffers there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.offload.copy_streams import Copy, Event, CopyStreams, copy_streams_of

__all__ = ["StagedChunk", "StagedChunks", "RingPass", "StagingRing"]

LEAST_SLOTS = 4  # in use, going out, and two coming in
MOST_BYTES = 64 << 20  # of a slot: a copy of that size is as fast per byte as any
ALIGNMENT = 512  # bytes, as torch's allocator aligns
LEAST = 8  # tensors of which a slot has room for 32 elements

StagedChunk = Mapping[str, Tensor]  # contiguous memory of the host


class StagedChunks(list[StagedChunk]):
    """Those of passes that are made again and again."""


def _nothing() -> None:
    """The loads of no pass."""


class StagingRing:
    """The buffers, and how big loads may be.

    Args:
        device: where.
        nbytes: of all buffers together, at most. The memory is allocated with the first pass, for no more buffers than
            that has loads.
        lanes: for copies; by default the device's.
        stamp: is another one once loads may have been written to otherwise than through their tensors.

    Attributes:
        slots: number of the buffers.
        slot_bytes: of each.
        most: loads of the longest pass.
        last: all that was to leave so far; None before there was anything.
        leaving: the loads of the pass that left last, if it is made again, and when those that it had in buffers have
            left, by number, in their order. Holds no load: state that an optimizer has dropped is to be gone.
        coming: events of the copies in that compute has not waited for, by load, of the pass that has the buffers. Not
            the pass: as a cycle the two would keep buffers, and state, until Python's garbage collector runs.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        lanes: CopyStreams | None = None,
        stamp: Callable[[], Any] = lambda: None,
    ) -> None:
        self._device = device
        self.stamp = stamp
        self.lanes = lanes or copy_streams_of(device)
        self.last: Event = None
        self.coming: dict[int, Event] = {}
        self.most = self.slot_bytes = 0
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """Other buffers, of so many bytes, from the next pass on. Not while one is under way."""
        if self.coming:  # what came ahead: nobody else may get that memory before it has
            self.lanes.wait(next(reversed(self.coming.values())))
            self.coming.clear()
        if self.last is not None:
            self.lanes.wait(self.last)
        before = self.slot_bytes
        self.slot_bytes = max(min(nbytes // LEAST_SLOTS, MOST_BYTES) // ALIGNMENT, LEAST) * ALIGNMENT
        self.most = self.most if self.slot_bytes == before else 0  # the same state is cut into other loads
        self.slots = self._allowed = max(nbytes // self.slot_bytes, LEAST_SLOTS)
        self.leaving: tuple[Callable[[], Sequence[StagedChunk] | None], dict[int, Event]] = _nothing, {}
        self.coming = {}
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """On the device, now."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def can_grow(self) -> bool:
        """Whether :meth:`resize` would make more buffers, for a pass that is longer than the first one was."""
        return self.slots < min(self._allowed, self.most)

    def elements(self, itemsizes: Sequence[int]) -> int:
        """How many elements of several tensors, of these sizes in bytes, one buffer holds: a multiple of 32, and at
        least that."""
        room = self.slot_bytes - len(itemsizes) * ALIGNMENT
        return max(room // max(sum(itemsizes), 1) // 32, 1) * 32

    def allocated(self) -> Tensor:
        """The memory of all buffers: bytes, allocated now if it was not before."""
        if self._memory is None:
            self.slots = max(min(self.slots, self.most), LEAST_SLOTS)
            self._memory = torch.empty(self.slots * self.slot_bytes, dtype=torch.uint8, device=self._device)
            # A training may end, and all of it go, while state is on its way.
            self.lanes.use(self._memory)
        return self._memory

    def buffers(self, number: int, like: StagedChunk) -> dict[str, Tensor]:
        """Where the load of this number of a pass lies on the device.

        Raises:
            ValueError: it is too large.
        """
        if not like:
            return {}
        memory, begin = self.allocated(), number % self.slots * self.slot_bytes
        found, end = {}, begin + self.slot_bytes
        for name, tensor in like.items():
            if begin + tensor.nbytes > end:
                raise ValueError(f"{name!r} of {tensor.nbytes} bytes does not fit into a slot of {self.slot_bytes}")
            found[name] = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return found


class RingPass:
    """Once through a ring.

    Args:
        ring: that no other pass is in.
        loads: in their order. One without tensors has nothing to bring, and may have something to take.
    """

    def __init__(self, ring: StagingRing, loads: Sequence[StagedChunk]) -> None:
        self._ring, self._lanes, self._loads = ring, ring.lanes, loads
        self._came: dict[int, Event] = {}  # by load, until compute has waited for it
        self._changed: dict[int, StagedChunk] = {}  # loads in the place of those that came
        self._left: Event = None
        self._versions: list[Any] = []

    def ahead(self) -> None:
        """The first loads come, each once its buffer, and it itself, has left."""
        self._ring.coming = self._came
        self._ring.most = max(self._ring.most, len(self._loads))
        if any(self._loads):
            # With deterministic algorithms torch fills new memory, on compute: behind `now` that would meet copies.
            self._ring.allocated()
        now, slots = self._lanes.now(), self._ring.slots
        (of, left), self._ring.leaving = self._ring.leaving, (_nothing, {})
        # Of the same loads the last ones leave, one from each buffer, and none that comes has left later than that.
        coming, count = {number % slots: event for number, event in left.items()}, min(slots, len(self._loads))
        if of() is not self._loads or len(coming) != count:
            coming = dict.fromkeys(range(count), self._ring.last)
        for number, event in coming.items():
            self._bring(number, [now] if event is None else [now, event])
        self._versions = self._look()

    @property
    def is_valid(self) -> bool:
        """Whether what has come ahead is still there, and what it was brought from has not been written to since."""
        return self._ring.coming is self._came and self._versions == self._look()

    def _look(self) -> list[Any]:
        coming = self._loads[: self._ring.slots]
        return [self._ring.stamp(), *(tensor._version for load in coming for tensor in load.values())]

    def join(self) -> None:
        """Compute waits for all that comes ahead. What follows on it may be captured up to :meth:`rejoin`."""
        if self._came:
            self._lanes.wait(next(reversed(self._came.values())))
        self._came.clear()

    def open(self, number: int) -> dict[str, Tensor]:
        """What compute, from here to :meth:`close`, finds of this load, and may change."""
        if number in self._came:
            self._lanes.wait(self._came.pop(number))
        return self._ring.buffers(number, self._loads[number])

    def close(self, number: int, load: StagedChunk | None = None, values: StagedChunk | None = None) -> None:
        """The load leaves, if its buffer is needed; otherwise :meth:`leave` sees to it.

        Args:
            number: that was opened.
            load: what goes in its place, if it is not what came.
            values: on the device, what of it may lie elsewhere than in the buffers.
        """
        load = self._changed[number] = self._loads[number] if load is None else load
        buffers = self._ring.buffers(number, load)
        for name, value in (values or {}).items():
            if value.data_ptr() != buffers[name].data_ptr():
                buffers[name].copy_(value.reshape(-1))
        if number + self._ring.slots < len(self._loads):
            self._left = self._take(number, load)
            self._bring(number + self._ring.slots, [self._left])

    def rejoin(self) -> None:
        """Compute waits for all that has left."""
        if self._left is not None:
            self._lanes.wait(self._left)

    def leave(self, numbers: Iterable[int] | None = None) -> None:
        """What is still in its buffers leaves: of these loads, or of those that were closed here."""
        left: dict[int, Event] = {}
        for number in sorted(self._changed if numbers is None else numbers):
            if number + self._ring.slots >= len(self._loads):
                self._left = left[number] = self._take(number, self._changed.get(number, self._loads[number]))
        if self._left is not None:
            self._ring.last = self._left
        self._ring.leaving = (weakref.ref(self._loads) if isinstance(self._loads, StagedChunks) else _nothing), left

    def _bring(self, number: int, after: Sequence[Event]) -> None:
        load = self._loads[number]
        buffers = self._ring.buffers(number, load)
        self._came[number] = self._lanes.bring([(buffers[name], load[name]) for name in load], after)

    def _take(self, number: int, load: StagedChunk) -> Event:
        buffers = self._ring.buffers(number, load)
        copies: list[Copy] = [(load[name], buffers[name]) for name in load]
        return self._lanes.take(copies, [self._lanes.now()])
