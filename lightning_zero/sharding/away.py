"""Master shards in the host's memory: which, and where it comes from.

A shard can lie there if compiled code reads its compute copy in its place. A device reads and writes it over its link
all the same, slowly, as a tensor like any other, so whatever looks at shards need not know where they are; only what
passes over all of them at each step does, and copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero.sharding.record import ShardedParameter

__all__ = ["Away", "leaves", "stays_wide", "used_in"]


@dataclass(frozen=True)
class Away:
    """What lies on the host.

    Attributes:
        dtype: that is computed in.
        allocate: zeros of so many elements: as the device sees them, and as the host does.
    """

    dtype: torch.dtype
    allocate: Callable[[int, torch.dtype], tuple[Tensor, Tensor]]

    def takes(self, record: ShardedParameter) -> bool:
        """Whether the parameter's master shard lies there."""
        return leaves(record, self.dtype)


def leaves(record: ShardedParameter, dtype: torch.dtype | None) -> bool:
    """Whether a parameter's master shard can lie on the host where compiled code computes in ``dtype``."""
    own = record.param.dtype
    return used_in(own, dtype) != own and not stays_wide(record)


def used_in(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype compiled code uses a parameter of its ``own``, where wider floating point ones are computed in
    ``dtype``."""
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > dtype.itemsize else own


def stays_wide(record: ShardedParameter) -> bool:
    """Whether autocast leaves the parameter in full precision, as norms and embeddings."""
    return len(record.layout.shape) < 2 or any(isinstance(owner, nn.Embedding) for owner, _ in record.owners)
