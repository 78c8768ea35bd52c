"""Counts the bytes of all tensors that are alive while code runs, without looking at their values: real ones, and fake
ones that have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import to_copy, unsafe_view
from lightning_zero.compat.tensors import TorchDispatchMode, tree_leaves
from lightning_zero.profiling.headroom import DeviceMemory

__all__ = ["MemoryCounter"]

_aten = torch.ops.aten
_NOTHING = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_COPIES = {to_copy, torch.ops.aten.clone.default}


class MemoryCounter(TorchDispatchMode):
    """Counts while it is entered, also what backward passes do.

    Only memory that is made inside counts. Casts and copies of weights do not: the engine makes them again in backward,
    a weight or a group at a time.

    Args:
        weights: that are there already, with whatever else should not be counted.

    Attributes:
        alive: bytes, now.
        peak: the most so far.
        flops: floating-point operations of what ran here, by torch's formulas; counted where ``count`` is given.
        moved: bytes that were read and written, likewise.
    """

    def __init__(self, weights: Iterable[Tensor] = (), count: Callable[..., int] | None = None) -> None:
        super().__init__()
        self.alive = self.peak = self.flops = self.moved = 0
        self._lately = 0  # the most since the last lap
        self._weights: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._count = count
        for weight in weights:
            self._weights.add(weight.untyped_storage())

    def is_weight(self, tensor: Tensor) -> bool:
        """Or a cast, or a copy of one."""
        return tensor.untyped_storage() in self._weights

    def adopt(self, value: Any) -> None:
        """What was made where nobody counted is alive from now on."""
        for tensor in _tensors(value):
            self._enter(tensor)

    def spike(self, nbytes: int) -> None:
        """For a moment so many more bytes were alive."""
        self._lately = max(self._lately, self.alive + nbytes)
        self.peak = max(self.peak, self._lately)

    def lap(self) -> DeviceMemory:
        """What is alive, and the most that was since the last lap, as a device would tell it."""
        now = DeviceMemory(0, others=0, reserved=0, allocated=self._lately, resident=self.alive)
        self._lately = self.alive
        return now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors(result)
        read = _tensors((args, kwargs))
        of_weights = func in _COPIES and all(tensor.untyped_storage() in self._weights for tensor in read)
        for tensor in read:  # what nobody saw being made was there before
            self._known.add(tensor.untyped_storage())
        for tensor in made:
            if of_weights:
                self._weights.add(tensor.untyped_storage())
            else:
                self._enter(tensor)
        if self._count is not None:
            self.flops += self._count(func, args, kwargs, result)
            if _moves(func) and not any(a is b for a in made for b in read):
                self.moved += sum(tensor.nbytes for tensor in (*made, *read))
        return result

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or storage in self._weights:
            return
        self._known.add(storage)
        nbytes = storage.nbytes()
        weakref.finalize(storage, self._leave, nbytes)
        self.alive += nbytes
        self.spike(0)

    def _leave(self, nbytes: int) -> None:
        self.alive -= nbytes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _moves(func: Any) -> bool:
    """Whether an op reads and writes its tensors: views do not, nor what asks for a device or for empty memory, as
    autograd does once or more for each gradient of a weight."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    nothing = func is unsafe_view or func.overloadpacket in _NOTHING
    return func.namespace != "prim" and not views and not nothing
