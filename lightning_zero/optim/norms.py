"""The norm of each sharded gradient. One collective for all of them; nothing is read on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.distributed import all_gather_into
from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.extrema import RunCollective, all_max, run_synchronously
from lightning_zero.mesh import Mesh
from lightning_zero.optim.clip import norm_dtype
from lightning_zero.sharding.shard_tensor import without_shard_dispatch

__all__ = ["all_reduce_sum", "parameter_norms"]


def all_reduce_sum(values: Tensor, mesh: Mesh, collective: RunCollective) -> None:
    """Adds up, in place, what the ranks have that hold the model together. Collective.

    Where each host holds a replica, the sums are the same on all of them to the bit, or what goes by them would drift
    apart: an all-reduce may add in another order on another host.

    Args:
        collective: starts one and waits for it, see :meth:`Executor.collective`.
    """
    group = mesh.shard_group.gather_group  # see Mesh.reduce_group
    if not mesh.replicated:
        collective(lambda later: dist.all_reduce(values, group=group, async_op=later))
        return
    parts = values.new_empty(mesh.shard_group.size * values.numel())
    collective(lambda later: all_gather_into()(parts, values.reshape(-1), group=group, async_op=later))
    values.copy_(parts.view(-1, *values.shape).sum(0))


@without_shard_dispatch
def parameter_norms(
    shards: Sequence[Tensor | None], norm_type: float, mesh: Mesh, device: torch.device, dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """The p-norm of each of these gradients over all ranks' shards together: scalars on ``device``, the same on every
    rank, in these dtypes. Zero where a rank has None; all ranks pass as many. Collective.

    Padding is zero and adds nothing.
    """
    present = [(number, shard.detach()) for number, shard in enumerate(shards) if shard is not None]
    # Powers of float32 numbers soon leave float32's range.
    powers = torch.zeros(len(shards), dtype=torch.float64, device=device)
    if present:
        numbers, grads = zip(*present, strict=True)
        sizes = [grad.abs() if grad.is_complex() else grad for grad in grads]
        local = foreach_norm(sizes, norm_type, dtype=norm_dtype(sizes))
        powers[list(numbers)] = torch.stack(list(local)).to(device=device, dtype=torch.float64)
    if math.isinf(norm_type):
        powers = all_max(powers, mesh.shard_group.gather_group)
    else:
        powers.pow_(norm_type)
        all_reduce_sum(powers, mesh, run_synchronously)
        powers.pow_(1 / norm_type)
    return [norm.to(dtype.to_real()) for norm, dtype in zip(powers.unbind(), dtypes, strict=True)]
