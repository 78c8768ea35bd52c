"""A few buffers on the device, through which much more passes that lies on the host.

While one buffer is computed in, those of the loads before it are on their way back to the host, and those of the loads
behind it on their way in. Four waits keep them apart; each stands in one line of :class:`Pass`:

    a copy in waits for compute         up to the moment at which the pass began: whoever had the buffer, or changed
                                        what lies on the host, comes first
    a copy in waits for a copy out      of the load that had the same buffer before
    compute waits for a copy in         of the load that it is about to use
    a copy out waits for compute        which writes what is to be copied

and when a pass ends, compute waits for the last copy out. So a pass leaves nothing behind, and may be captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_zero.offload.lanes import Event, Lanes, lanes_of

__all__ = ["Load", "Pass", "Ring"]

SLOTS = 4  # in use, going out, and two coming in
ALIGNMENT = 512  # bytes, as torch's allocator aligns
LEAST = 8  # tensors of which a slot has room for 32 elements

Load = Mapping[str, Tensor]  # contiguous memory of the host


class Ring:
    """The buffers, and how big loads may be.

    Args:
        device: where.
        nbytes: of all buffers together. The memory is allocated with the first pass.
        lanes: for copies; by default the device's.
    """

    def __init__(self, device: torch.device, nbytes: int, lanes: Lanes | None = None) -> None:
        self._device = device
        self.lanes = lanes or lanes_of(device)
        self.slot_bytes = max(nbytes // SLOTS // ALIGNMENT, LEAST) * ALIGNMENT
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """On the device, now."""
        return 0 if self._memory is None else self._memory.nbytes

    def elements(self, itemsizes: Sequence[int]) -> int:
        """How many elements of several tensors, of these sizes in bytes, one buffer holds: a multiple of 32, and at
        least that."""
        room = self.slot_bytes - len(itemsizes) * ALIGNMENT
        return max(room // max(sum(itemsizes), 1) // 32, 1) * 32

    def buffers(self, slot: int, like: Load) -> dict[str, Tensor]:
        """In one of the ring's slots, memory for these.

        Raises:
            ValueError: there is not so much.
        """
        if not like:
            return {}
        if self._memory is None:
            self._memory = torch.empty(SLOTS * self.slot_bytes, dtype=torch.uint8, device=self._device)
        found, begin, end = {}, slot * self.slot_bytes, (slot + 1) * self.slot_bytes
        for name, tensor in like.items():
            if begin + tensor.nbytes > end:
                raise ValueError(f"{name!r} of {tensor.nbytes} bytes does not fit into a slot of {self.slot_bytes}")
            found[name] = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return found


class Pass:
    """Once through a ring, one load after the other: ``open(0)``, ``close(0)``, ``open(1)``, ... and ``end()``.

    Args:
        ring: that no other pass is in.
        loads: in their order. One without tensors has nothing to bring, and may have something to take.
    """

    def __init__(self, ring: Ring, loads: Sequence[Load]) -> None:
        self._ring, self._lanes, self._loads = ring, ring.lanes, loads
        self._began = self._lanes.now()
        self._started = 0
        self._came: dict[int, Event] = {}  # by slot
        self._left: dict[int, Event] = {}
        self._last: Event = None

    def open(self, number: int) -> dict[str, Tensor]:
        """What compute, from here to :meth:`close`, finds of this load, and may change. Loads behind it start."""
        while self._started < min(number + SLOTS, len(self._loads)):
            self._start(self._started)
            self._started += 1
        slot = number % SLOTS
        self._lanes.wait(self._came[slot])
        return self._ring.buffers(slot, self._loads[number])

    def _start(self, number: int) -> None:
        slot, load = number % SLOTS, self._loads[number]
        after = [self._began, self._left[slot]] if slot in self._left else [self._began]
        buffers = self._ring.buffers(slot, load)
        self._came[slot] = self._lanes.bring([(buffers[name], load[name]) for name in load], after)

    def close(self, number: int, load: Load | None = None, values: Load | None = None) -> None:
        """The load goes back to the host.

        Args:
            number: that was opened.
            load: what goes in its place, if it is not what came.
            values: on the device, what of it may lie elsewhere than in the buffers.
        """
        slot, load = number % SLOTS, self._loads[number] if load is None else load
        buffers = self._ring.buffers(slot, load)
        for name, value in (values or {}).items():
            if value.data_ptr() != buffers[name].data_ptr():
                buffers[name].copy_(value.reshape(-1))
        computed = self._lanes.now()
        self._last = self._left[slot] = self._lanes.take([(load[name], buffers[name]) for name in load], [computed])

    def end(self) -> None:
        """Compute goes on when everything has left. Harmless when repeated."""
        last, self._last = self._last, None
        if last is not None:
            self._lanes.wait(last)
