"""A tensor in a file where only fsspec reaches, and each request takes long: read whole, or by ranges, whatever asks
for less of its store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.checkpoint_tensors import Placed, Ranges

__all__ = ["PieceElsewhere"]

LEAST_SPARED = 4 << 20  # bytes: to find out where values lie takes two requests more


class PieceElsewhere(Placed):
    """What ``torch.save`` has put at some place of a file.

    Args:
        ranges: of the file.
        length: of the piece, in bytes.
        find: the position of the tensor's first element in the file, in bytes; None where its values do not lie plainly
            there.
        load: all of it, of these sizes.
        dtype: its own.
        sizes: its own.
    """

    def __init__(
        self,
        ranges: Ranges,
        length: int,
        find: Callable[[], int | None],
        load: Callable[[], Tensor],
        dtype: torch.dtype,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(ranges, 0, dtype, sizes)
        self._length, self._find, self._load = length, find, load
        self._is_found, self._left = False, length
        self._whole: Tensor | None = None

    def copy(self, index: tuple[slice, ...], into: Tensor) -> None:
        if self._whole is None and self._spares(into.numel() * self.dtype.itemsize):
            super().copy(index, into)
            return
        if self._whole is None:
            self._whole = self._load()
        into.copy_(self._whole[index])

    def _spares(self, wanted: int) -> bool:
        """Whether ranges are less than the whole, with those that were read before."""
        self._left -= wanted
        if self._left < LEAST_SPARED or self._left < self._length // 2:
            return False
        if not self._is_found:
            start = self._find()
            if start is None:
                self._left = 0
                return False
            self._start, self._is_found = start, True
        return True
