"""Find the sizes of a module's arguments that change from call to call, before the module is compiled.

torch compiles for the first sizes, and once more, for any size, when one changes. The first training step runs eagerly,
so its calls already show most changes. :class:`ChangingSizes` marks these dimensions, and the first compilation is for
any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.dynamo import mark_dynamic
from lightning_zero.compat.tensors import tree_leaves


class ChangingSizes:
    """Sizes of the arguments of modules over their calls on this rank."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], list[torch.Size]] = {}
        self._changed: dict[tuple[Any, ...], set[tuple[int, int]]] = {}  # numbers of a tensor and of a dimension

    def add(self, name: str, args: Any, kwargs: Any) -> None:
        """Add a call of the module of this name."""
        self._add(name, _tensors(args, kwargs))

    def mark(self, name: str, args: Any, kwargs: Any) -> None:
        """Add a call, and mark the dimensions of its arguments that have changed between calls of this form."""
        tensors = _tensors(args, kwargs)
        for number, dim in self._add(name, tensors):
            if tensors[number].shape[dim] > 1:  # torch compiles for 0 and 1 apart
                mark_dynamic(tensors[number], dim)

    def _add(self, name: str, tensors: list[Tensor]) -> set[tuple[int, int]]:
        form = name, *(tensor.dim() for tensor in tensors)
        first = self._first.setdefault(form, [tensor.shape for tensor in tensors])
        changed = self._changed.setdefault(form, set())
        for number, (size, tensor) in enumerate(zip(first, tensors, strict=True)):
            if size != tensor.shape:
                changed |= {(number, dim) for dim in range(len(size)) if size[dim] != tensor.shape[dim]}
        return changed


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, sorted(kwargs.items()))) if isinstance(leaf, Tensor)]
