"""Flat memory that shards, or their gradients, are views of: one contiguous tensor per dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.sharding.layout import ShardLayout

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """One zeroed tensor per dtype, cut into 1-D pieces in the order given.

    Args:
        pieces: layout and dtype of each piece; neighbours of one dtype are neighbours in memory.
        device: where.
        memory: zeros of the right sizes (:meth:`sizes`), if they are to lie somewhere else.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[ShardLayout, torch.dtype]],
        device: torch.device,
        memory: dict[torch.dtype, Tensor] | None = None,
    ) -> None:
        totals = self.sizes(pieces)
        self.flat: dict[torch.dtype, Tensor] = memory or {
            dtype: torch.zeros(total, dtype=dtype, device=device) for dtype, total in totals.items()
        }
        self.views: list[Tensor] = []
        offsets = dict.fromkeys(totals, 0)
        for layout, dtype in pieces:
            begin = offsets[dtype]
            offsets[dtype] = begin + layout.shard_numel
            self.views.append(self.flat[dtype][begin : offsets[dtype]])

    @staticmethod
    def sizes(pieces: Sequence[tuple[ShardLayout, torch.dtype]]) -> dict[torch.dtype, int]:
        """Elements of each dtype."""
        totals: dict[torch.dtype, int] = {}
        for layout, dtype in pieces:
            totals[dtype] = totals.get(dtype, 0) + layout.shard_numel
        return totals

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat.values())

    def __repr__(self) -> str:
        parts = ", ".join(f"{dtype}: {tensor.numel():,}" for dtype, tensor in self.flat.items())
        return f"Arena({parts}; {self.nbytes / 2**20:.1f} MiB)"
