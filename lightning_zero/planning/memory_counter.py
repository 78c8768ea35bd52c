"""Count the bytes of live tensors, real or fake, while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import TorchDispatchMode, to_copy, tree_leaves, unsafe_view

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_COPIES = {to_copy, torch.ops.aten.clone.default}


class MemoryCounter(TorchDispatchMode):
    """Counts the tensors that are made while the mode is active, in backward passes too.

    Casts and copies of weights do not count, because the engine makes them again in backward, one group at a time.

    Args:
        weights: tensors that exist already and do not count.
        count_flops: returns the operations of a call of an op; None counts neither operations nor bytes.

    Attributes:
        alive: bytes now.
        peak: maximum of ``alive``.
        flops: floating-point operations so far.
        moved: bytes read and written so far.
    """

    def __init__(self, weights: Iterable[Tensor] = (), count_flops: Callable[..., int] | None = None) -> None:
        super().__init__()
        self.alive = self.peak = self.flops = self.moved = 0
        self._weights: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._count_flops = count_flops
        for weight in weights:
            self._weights.add(weight.untyped_storage())

    def is_weight(self, tensor: Tensor) -> bool:
        """Return True for a weight, or a cast or copy of one."""
        return tensor.untyped_storage() in self._weights

    def add(self, value: Any) -> None:
        """Count tensors that were made while the mode was not active."""
        for tensor in _tensors(value):
            self._enter(tensor)

    def add_temporary(self, nbytes: int) -> None:
        """Count bytes that are alive for a moment."""
        self.peak = max(self.peak, self.alive + nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors(result)
        read = _tensors((args, kwargs))
        of_weights = func in _COPIES and all(tensor.untyped_storage() in self._weights for tensor in read)
        for tensor in read:  # those that were not counted when they were made existed before
            self._known.add(tensor.untyped_storage())
        for tensor in made:
            if of_weights:
                self._weights.add(tensor.untyped_storage())
            else:
                self._enter(tensor)
        if self._count_flops is not None:
            self.flops += self._count_flops(func, args, kwargs, result)
            if _moves_bytes(func) and not any(a is b for a in made for b in read):
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
        self.peak = max(self.peak, self.alive)

    def _leave(self, nbytes: int) -> None:
        self.alive -= nbytes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _moves_bytes(func: Any) -> bool:
    """Return False for views, empty allocations and queries of a device."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    nothing = func is unsafe_view or func.overloadpacket in _ALLOCATIONS
    return func.namespace != "prim" and not views and not nothing
