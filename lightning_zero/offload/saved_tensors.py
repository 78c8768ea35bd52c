"""Offload tensors that eager code saves for backward, if the device runs short of memory.

The first training step runs eagerly, before anything can be planned, and saves tensors that compiled code would
recompute. Tensors stay on the device until memory is short. Then the oldest, which backward needs last, are copied to
the host; also during backward, which begins with the loss's temporary memory. torch's ``save_on_cpu`` would offload all
tensors in every step. Copies are unpinned, because pinning takes longer than the one step that needs it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.offload.pinned_memory import free_bytes


class VersionedTensor(NamedTuple):
    """Detect changes of a saved tensor. torch checks versions itself, except if pack hooks are used.

    Attributes:
        tensor: detached, because the result of an operation would keep itself alive through its own graph.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> VersionedTensor:
        return cls(tensor.detach(), tensor._version)

    @property
    def is_unchanged(self) -> bool:
        """Return True if the tensor was not changed since it was saved."""
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """Return the tensor, or raise torch's RuntimeError if it was changed in place."""
        if self.is_unchanged:
            return self.tensor
        shape = "x".join(map(str, self.tensor.shape)) or "no dimensions"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of {shape} in {str(self.tensor.dtype).removeprefix('torch.')} was saved for backward at "
            f"version {self.version} and is at version {self.tensor._version} now. Write to a new tensor, or "
            "clone the tensor before it is changed."
        )


MIN_OFFLOAD_BYTES = 1 << 20  # smaller storages stay
MAX_STORAGE_RATIO = 8  # a tensor in a larger storage is part of a flat buffer, which stays


class _SavedStorage:
    """Hold a storage as it was when its first tensor was saved, on the device or on the host."""

    def __init__(self, tensor: Tensor, offload_oldest: Callable[[], None]) -> None:
        self.offload_oldest = offload_oldest
        storage = tensor.untyped_storage()
        self.source = weakref.ref(storage)
        self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self.device_tensor: VersionedTensor | None = VersionedTensor.of(tensor)  # keeps the storage alive
        self.flat: Tensor = _tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)

    def to_host(self) -> int:
        if self.device_tensor is None or not self.device_tensor.is_unchanged:
            return 0  # changed in place: backward raises
        host = torch.empty(self.flat.numel(), dtype=torch.uint8)
        host.copy_(self.flat)
        self.flat, self.device_tensor = host, None
        return host.numel()

    def to_device(self) -> Tensor:
        """Return all bytes on the device, after making room there."""
        self.offload_oldest()
        if self.device_tensor is not None:
            self.device_tensor.unpack()
        return self.flat.to(self.device)


class SavedTensor(NamedTuple):
    """Stand for a tensor that autograd has saved."""

    memory: _SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        to_device = self.memory.to_device()
        return _tensor_over(to_device.untyped_storage(), self.dtype, self.size, self.stride, self.offset)


class SavedTensorOffload:
    """Pack the tensors that autograd saves in one forward.

    Args:
        excess: returns the bytes that are too many on the device now; negative if there is room.
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
        self._on_device: deque[weakref.ref[_SavedStorage]] = deque()  # oldest first

    def pack(self, tensor: Tensor) -> VersionedTensor | SavedTensor:
        """Return the object that autograd saves instead of the tensor."""
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
        # Layers that read the same activation each save it; one copy serves all.
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
            torch.accelerator.synchronize(self._device)  # the storage may have been written on another stream
        while excess > 0 and self._on_device:
            memory = self._on_device.popleft()()
            if memory is None:
                continue
            free = free_bytes()
            if free is not None and free < 2 * memory.flat.numel():
                self._on_device.clear()  # the system would end the process if host memory ran out
                return
            left = memory.to_host()
            self.nbytes += left
            excess -= left


def _tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
