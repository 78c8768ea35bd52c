"""Whole parameters for a while: inside the context, the module is the plain module it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.unsupported import no_shard_dispatch

if TYPE_CHECKING:
    from lightning_zero.sharding.shard import Sharder

__all__ = ["full_parameters", "gather_full"]


def gather_full(record: ShardedParameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole parameter on the shard's device, in its own dtype or another, detached from autograd. Collective."""
    shape, dtype = list(record.layout.memory_shape), dtype or record.param.dtype
    with torch.no_grad(), no_shard_dispatch():
        return record.layout.permute_from_memory(torch.ops.lightning_zero.gather(record.param, shape, dtype))


@contextmanager
def full_parameters(sharder: Sharder, module: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Puts whole parameters in place of the shards of ``module`` and its children.

    Collective on entry. Takes the memory of the whole parameters on every rank. With ``writeback``, what they hold on
    exit reaches the shards: each rank keeps its own part, so every rank must make the same edits.
    """
    inside = {id(child) for child in module.modules()}
    records = [r for r in sharder.live if any(id(owner) in inside for owner, _ in r.owners)]
    with no_shard_dispatch():
        records = [r for r in records if r.param.shape != r.layout.shape or r.param.data_ptr() == r.shard.data_ptr()]
    sharder.sync.settle()
    grads = {}
    for record in records:
        full = gather_full(record)
        grads[record.index] = record.param.grad
        record.param.grad = None
        record.set_full_data(full)
        for owner, key in record.owners:
            owner.__dict__[SHAPES][key] = None
    try:
        yield
    finally:
        for record in records:
            if writeback:
                sharder.sync.before_writing()
                with torch.no_grad():
                    record.layout.write(record.shard, record.param, sharder.mesh.shard_index)
            record.param.grad = None
            record.install_shard()
            record.param.grad = grads[record.index]
            for owner, key in record.owners:
                owner.__dict__[SHAPES][key] = tuple(record.layout.shape)
        sharder.sync.after_writing()
