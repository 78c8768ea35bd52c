"""Fake tensors that are parts of one memory, as views of one tensor are, made beside torch's dispatcher: it takes
milliseconds for each form that it has not seen, and a graph has a thousand weights in its groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.compat.tensors import fake_like
from lightning_zero.compat.tensors import FakeTensor, no_python_dispatcher, no_dispatch_modes

__all__ = ["FakeBuffer"]


class FakeBuffer:
    """Memory for a node's values.

    Args:
        like: a value of the dtype and the device that its parts get. Where it is no fake tensor, neither are they.
        numel: elements.

    Attributes:
        numel: as given.
    """

    def __init__(self, like: Tensor, numel: int) -> None:
        self._like, self.numel = like, numel
        if isinstance(like, FakeTensor):
            with no_dispatch_modes(), no_python_dispatcher():
                self._all = torch.empty(numel, dtype=like.dtype, device="meta")
        else:
            self._all = like.new_empty(numel)

    def part(self, begin: int, shape: Sequence[int]) -> Tensor:
        """A contiguous part of this memory, from its element ``begin`` on."""
        strides = [1] * len(shape)
        for at in range(len(shape) - 1, 0, -1):
            strides[at - 1] = strides[at] * max(shape[at], 1)
        like = self._like
        if not isinstance(like, FakeTensor):
            return self._all.as_strided(shape, strides, begin)
        with no_dispatch_modes(), no_python_dispatcher():
            return fake_like(like, self._all.as_strided(shape, strides, begin))
