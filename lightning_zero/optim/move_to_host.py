"""State that optimizers made on the device leaves it at once where it is to lie on the host from now on.

A step takes it in, to where it lies for good. But between the decision and that step there is a forward and a backward,
for which the device was to have room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.sharding.param_record import ShardedParameter

__all__ = ["move_state_to_host"]


def move_state_to_host(optimizer: torch.optim.Optimizer, find: Callable[[Tensor], ShardedParameter | None]) -> None:
    """What is as large as shards lies in plain memory of the host afterwards, as state that was loaded."""
    for param, entries in optimizer.state.items():
        record = find(param)
        if record is not None:
            entries.update({key: value.to("cpu") for key, value in entries.items() if record.has_shard_shape(value)})
