"""Memory for gradients on their way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.config import EngineConfig
from lightning_zero.planning.static import ParamShard

__all__ = ["reduce_bucket_bytes"]

MIB = 2**20


def reduce_bucket_bytes(cuts: Sequence[ParamShard], config: EngineConfig, ranks: int, copied: bool) -> int:
    """Of one rank.

    Args:
        ranks: of a host.
        copied: gradients are copied into peers' memory, and wait in memory of their own; otherwise they are copied into
            buckets, which collectives reduce.
    """
    limit = config.tuning.reduce_bucket_mb * MIB
    if copied:
        return int(2 * limit)
    held: dict[torch.dtype, int] = {}
    largest: dict[torch.dtype, int] = {}
    for c in reversed(cuts):  # as gradients come, until the first backward has shown how they do
        if not c.trained:
            continue
        own = c.dtype.is_floating_point and config.wire_dtype is not None
        dtype = config.wire_dtype if own and config.wire_dtype is not None else c.dtype
        most = limit // dtype.itemsize // ranks
        fits = held.get(dtype, 0) + c.elements <= most
        held[dtype] = held.get(dtype, 0) + c.elements if fits else c.elements
        largest[dtype] = max(largest.get(dtype, 0), held[dtype])
    depth = 2 if config.tuning.reduce_double_buffer else 1
    return sum(depth * (ranks + 1) * elements * dtype.itemsize for dtype, elements in largest.items())
