"""Gives modules whole parameters and their own classes back."""

from __future__ import annotations

from torch import nn

from lightning_zero.sharding.full import full_parameters
from lightning_zero.sharding.module_patching import ClassCache, is_sharded
from lightning_zero.sharding.shard import Sharder

__all__ = ["unshard_module"]


def unshard_module(sharder: Sharder, module: nn.Module) -> None:
    """Makes all that ``sharder`` has sharded in ``module`` plain again, on this rank's device. Collective."""
    records = sharder.live
    with full_parameters(sharder, module, writeback=False):
        values = [record.param.data for record in records]
    for record, value in zip(records, values, strict=True):
        record.param.grad = None
        record.install_full(value)
        for owner, _ in record.owners:
            if is_sharded(owner):
                ClassCache.restore(owner)
