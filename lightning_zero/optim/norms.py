"""The norm of each sharded gradient. One all-reduce for all of them; nothing is read on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.optim.clip import norm_dtype
from lightning_zero.sharding.refusals import on_plain_tensors

__all__ = ["norms_of_each"]


@on_plain_tensors
def norms_of_each(
    shards: Sequence[Tensor | None], norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """The p-norm of each of these gradients over all ranks' shards together: scalars on ``device``, the same on every
    rank, in the gradients' dtypes. Zero where a rank has None; all ranks pass as many. Collective.

    Padding is zero and adds nothing.
    """
    present = [(number, shard.detach()) for number, shard in enumerate(shards) if shard is not None]
    # Powers of float32 numbers soon leave float32's range.
    powers = torch.zeros(len(shards), dtype=torch.float64, device=device)
    if present:
        numbers, grads = zip(*present, strict=True)
        local = foreach_norm(list(grads), norm_type, dtype=norm_dtype(grads))
        powers[list(numbers)] = torch.stack(list(local)).to(device=device, dtype=torch.float64)
    if math.isinf(norm_type):
        dist.all_reduce(powers, op=dist.ReduceOp.MAX, group=group)
    else:
        powers.pow_(norm_type)
        dist.all_reduce(powers, group=group)
        powers.pow_(1 / norm_type)
    dtypes = [torch.float32 if shard is None else shard.dtype for shard in shards]
    return [norm.to(dtype) for norm, dtype in zip(powers.unbind(), dtypes, strict=True)]
