"""What eager code saves for backward, of which the oldest goes to the host while the device has too little left.

A first training step runs eagerly, before anything is known that could be planned, and saves what compiled code would
compute again. Nobody knows beforehand what comes: so everything stays where it is at first, and what was saved first,
which backward needs last, is copied to the host once there is more than there should be, and back when it is asked for;
also while backward runs, which begins with what a loss takes for a moment, and nobody has seen that coming.
Copies are plain ones, of memory that is not pinned: pinning takes longer than a step, and nobody does this twice.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.offload.memory import free_bytes
from lightning_zero.offload.mutation_check import VersionedTensor

__all__ = ["SavedTensorOffload", "SavedTensor"]

LEAST_BYTES = 1 << 20  # what is smaller stays
MOST_AROUND = 8  # times a tensor's bytes: it is a part of something larger, an arena of weights or of a user's


class _Memory:
    """Of saved tensors that share it, as it was when the first of them was saved: on the device, or on the host.
    ``make_room`` comes before it is given back to backward."""

    def __init__(self, tensor: Tensor, make_room: Callable[[], None]) -> None:
        self.make_room = make_room
        storage = tensor.untyped_storage()
        self.source = weakref.ref(storage)
        self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self.here: VersionedTensor | None = VersionedTensor.of(tensor)  # keeps the storage
        self.flat: Tensor = _over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)

    def leave(self) -> int:
        if self.here is None or not self.here.holds:
            return 0  # what is wanted is not there any more, which backward will hear
        host = torch.empty(self.flat.numel(), dtype=torch.uint8)
        host.copy_(self.flat)
        self.flat, self.here = host, None
        return host.numel()

    def there(self) -> Tensor:
        """All of it, on its device."""
        self.make_room()
        if self.here is not None:
            self.here.unpack()
        return self.flat.to(self.device)


class SavedTensor(NamedTuple):
    """Stands for a tensor that autograd has saved."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        """The tensor, on its device.

        Raises:
            RuntimeError: it was changed before it left.
        """
        there = self.memory.there()
        return _over(there.untyped_storage(), self.dtype, self.size, self.stride, self.offset)


class SavedTensorOffload:
    """Packs what autograd saves in one forward.

    Args:
        device: whose memory it is.
        excess: bytes of it by which there is too much now; below 0 where there is room.
        least_bytes: smaller memory stays.
        unwatched: bytes that are saved first, and stay; nobody is asked about the device before.

    Attributes:
        nbytes: that have left so far.
        largest: bytes of the largest thing that was saved so far, of what may leave.
    """

    def __init__(
        self,
        device: torch.device,
        excess: Callable[[], float],
        least_bytes: int = LEAST_BYTES,
        unwatched: float = 0.0,
    ) -> None:
        self.nbytes = self.largest = 0
        self._unwatched = unwatched
        self._device = device
        self._excess = excess
        self._least_bytes = least_bytes
        self._known: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._here: deque[weakref.ref[_Memory]] = deque()  # the oldest first

    def pack(self, tensor: Tensor) -> VersionedTensor | SavedTensor:
        """What is to be saved in the tensor's place."""
        if not self._may_leave(tensor):
            return VersionedTensor.of(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        self.largest = max(self.largest, nbytes)
        if self._unwatched > 0:
            self._unwatched -= nbytes
            return VersionedTensor.of(tensor)
        memory = self._memory(tensor)
        self._make_room()
        return SavedTensor(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _may_leave(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self._device
        if not plain or tensor.is_conj() or tensor.is_neg():
            return False
        return self._least_bytes <= tensor.untyped_storage().nbytes() <= MOST_AROUND * tensor.nbytes

    def _memory(self, tensor: Tensor) -> _Memory:
        # Layers that read the same activation save it once each: copies of it would be memory that nobody has.
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is not None and known.source() is storage and known.version == tensor._version:
            return known
        memory = self._known[storage.data_ptr()] = _Memory(tensor, self._make_room)
        self._here.append(weakref.ref(memory))
        return memory

    def _make_room(self) -> None:
        excess = self._excess()
        if excess > 0 and self._here and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # it may have been made on another stream than this one
        while excess > 0 and self._here:
            memory = self._here.popleft()()
            if memory is None:
                continue
            free = free_bytes()
            if free is not None and free < 2 * memory.flat.numel():
                self._here.clear()  # a host that is full would end the process
                return
            left = memory.leave()
            self.nbytes += left
            excess -= left


def _over(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
