"""What autograd has saved must not be changed until backward reads it. Torch looks for that itself, unless there are
hooks that pack what is saved: gradients would be wrong, and nobody would be told.

---

What eager code saves for backward, of which the oldest goes to the host while the device has too little left.

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

from lightning_zero.offload.pinned_memory import free_bytes

__all__ = ["SavedTensor", "SavedTensorOffload", "VersionedTensor"]


class VersionedTensor(NamedTuple):
    """A tensor as it is saved.

    Attributes:
        tensor: detached: the result of an operation would keep itself alive by its own history.
        version: that it had.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> VersionedTensor:
        return cls(tensor.detach(), tensor._version)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has changed it since."""
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed, as torch's own.
        """
        if self.is_unchanged:
            return self.tensor
        shape = "x".join(map(str, self.tensor.shape)) or "no dimensions"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of {shape} in {str(self.tensor.dtype).removeprefix('torch.')} was saved for backward at "
            f"version {self.version} and is at version {self.tensor._version} now. Write to a new tensor, or "
            "clone the tensor before it is changed."
        )


MIN_OFFLOAD_BYTES = 1 << 20  # what is smaller stays
MAX_STORAGE_RATIO = 8  # times a tensor's bytes: it is a part of something larger, an arena of weights or of a user's


class _SavedStorage:
    """Of saved tensors that share it, as it was when the first of them was saved: on the device, or on the host.
    ``offload_oldest`` comes before it is given back to backward."""

    def __init__(self, tensor: Tensor, offload_oldest: Callable[[], None]) -> None:
        self.offload_oldest = offload_oldest
        storage = tensor.untyped_storage()
        self.source = weakref.ref(storage)
        self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self.here: VersionedTensor | None = VersionedTensor.of(tensor)  # keeps the storage
        self.flat: Tensor = _tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)

    def to_host(self) -> int:
        if self.here is None or not self.here.is_unchanged:
            return 0  # what is wanted is not there any more, which backward will hear
        host = torch.empty(self.flat.numel(), dtype=torch.uint8)
        host.copy_(self.flat)
        self.flat, self.here = host, None
        return host.numel()

    def to_device(self) -> Tensor:
        """All of it, on its device."""
        self.offload_oldest()
        if self.here is not None:
            self.here.unpack()
        return self.flat.to(self.device)


class SavedTensor(NamedTuple):
    """Stands for a tensor that autograd has saved."""

    memory: _SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        """The tensor, on its device.

        Raises:
            RuntimeError: it was changed before it left.
        """
        to_device = self.memory.to_device()
        return _tensor_over(to_device.untyped_storage(), self.dtype, self.size, self.stride, self.offset)


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
        least_bytes: int = MIN_OFFLOAD_BYTES,
        unchecked_bytes: float = 0.0,
    ) -> None:
        self.nbytes = self.largest = 0
        self._unchecked_bytes = unchecked_bytes
        self._device = device
        self._excess = excess
        self._least_bytes = least_bytes
        self._known: weakref.WeakValueDictionary[int, _SavedStorage] = weakref.WeakValueDictionary()
        self._on_device: deque[weakref.ref[_SavedStorage]] = deque()  # the oldest first

    def pack(self, tensor: Tensor) -> VersionedTensor | SavedTensor:
        """What is to be saved in the tensor's place."""
        if not self._can_offload(tensor):
            return VersionedTensor.of(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        self.largest = max(self.largest, nbytes)
        if self._unchecked_bytes > 0:
            self._unchecked_bytes -= nbytes
            return VersionedTensor.of(tensor)
        memory = self._memory(tensor)
        self._offload_oldest()
        return SavedTensor(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _can_offload(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self._device
        if not plain or tensor.is_conj() or tensor.is_neg():
            return False
        return self._least_bytes <= tensor.untyped_storage().nbytes() <= MAX_STORAGE_RATIO * tensor.nbytes

    def _memory(self, tensor: Tensor) -> _SavedStorage:
        # Layers that read the same activation save it once each: copies of it would be memory that nobody has.
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is not None and known.source() is storage and known.version == tensor._version:
            return known
        memory = self._known[storage.data_ptr()] = _SavedStorage(tensor, self._offload_oldest)
        self._on_device.append(weakref.ref(memory))
        return memory

    def _offload_oldest(self) -> None:
        excess = self._excess()
        if excess > 0 and self._on_device and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # it may have been made on another stream than this one
        while excess > 0 and self._on_device:
            memory = self._on_device.popleft()()
            if memory is None:
                continue
            free = free_bytes()
            if free is not None and free < 2 * memory.flat.numel():
                self._on_device.clear()  # a host that is full would end the process
                return
            left = memory.to_host()
            self.nbytes += left
            excess -= left


def _tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
