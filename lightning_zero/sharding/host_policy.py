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

from lightning_zero.errors import HostMemoryError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding.record import ShardedParameter

__all__ = ["HostMasterPolicy", "HostMasters", "can_be_on_host", "stays_full_precision", "compute_dtype_of"]


@dataclass(frozen=True)
class HostMasterPolicy:
    """What lies on the host.

    Attributes:
        dtype: that is computed in.
        allocate: zeros of so many elements: as the device sees them, and as the host does.
    """

    dtype: torch.dtype
    allocate: Callable[[int, torch.dtype], tuple[Tensor, Tensor]]

    def includes(self, record: ShardedParameter) -> bool:
        """Whether the parameter's master shard lies there."""
        return can_be_on_host(record, self.dtype)


class HostMasters:
    """Their memory, which is allocated once: that takes long, and there may be no more.

    Attributes:
        away: which lie there.
        seen: by dtype, as the device sees it.
    """

    def __init__(self, away: HostMasterPolicy) -> None:
        self.away = away
        self.seen: dict[torch.dtype, Tensor] = {}
        self._own: dict[torch.dtype, Tensor] = {}  # the same, as the host sees it

    def allocate(self, sizes: dict[torch.dtype, int]) -> None:
        """So many elements by dtype, zeros where it is not there yet.

        Raises:
            HostMemoryError: the host has not so much.
        """
        if {dtype: tensor.numel() for dtype, tensor in self.seen.items()} != sizes:
            both = {dtype: self.away.allocate(size, dtype) for dtype, size in sizes.items()}
            self.seen = {dtype: seen for dtype, (seen, _) in both.items()}
            self._own = {dtype: own for dtype, (_, own) in both.items()}

    def allocate_together(self, sizes: dict[torch.dtype, int], mesh: Mesh) -> None:
        """Likewise on every rank, since a plan wants it: no rank may wait for one that has failed. Collective.

        Raises:
            HostMemoryError: on every rank, where the host of one has not so much.
        """
        error = None
        try:
            self.allocate(sizes)
        except HostMemoryError as failure:
            error = str(failure)
        if (first := mesh.first_rank_error(error)) is not None:
            raise HostMemoryError(
                "Nothing but master weights on the host would hold memory=. Pass offload=('optimizer',) to keep them, "
                "with less in a batch, or, on rank {}: {}".format(*first)
            )

    def on_host(self, shard: Tensor) -> Tensor:
        """A piece of what the device sees, as the host does."""
        begin = shard.storage_offset()
        return self._own[shard.dtype][begin : begin + shard.numel()]


def can_be_on_host(record: ShardedParameter, dtype: torch.dtype | None) -> bool:
    """Whether a parameter's master shard can lie on the host where compiled code computes in ``dtype``."""
    own = record.param.dtype
    return compute_dtype_of(own, dtype) != own and not stays_full_precision(record)


def compute_dtype_of(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype compiled code uses a parameter of its ``own``, where wider floating point ones are computed in
    ``dtype``."""
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > dtype.itemsize else own


def stays_full_precision(record: ShardedParameter) -> bool:
    """Whether autocast leaves the parameter in full precision, as norms and embeddings."""
    return len(record.layout.shape) < 2 or any(isinstance(owner, nn.Embedding) for owner, _ in record.owners)
