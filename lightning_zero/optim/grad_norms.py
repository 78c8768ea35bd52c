"""Norms of sharded gradients and the clip factor, without host synchronization."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.distributed import all_gather_into
from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.mesh import Mesh, RunCollective, all_max, run_synchronously
from lightning_zero.sharding.shard_tensor import without_shard_dispatch


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of sums over these tensors: float64 if one has it, else float32."""
    return torch.float64 if any(tensor.dtype.to_real() is torch.float64 for tensor in tensors) else torch.float32


def clip_factor(squared_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)


def all_reduce_sum(values: Tensor, mesh: Mesh, collective: RunCollective) -> None:
    """Sum values in place over the ranks that hold the model together. Collective.

    With replicas on several hosts, the sums must be bitwise equal on all hosts, or the replicas diverge. An all-reduce
    may add in another order on another host, so each rank gathers and sums.

    Args:
        collective: Starts the collective and waits for it, see :meth:`Executor.collective`.
    """
    group = mesh.shard_group.gather_group  # Mesh.reduce_group must stay unused with peer copies
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
    """Return the p-norm of each gradient over all ranks' shards. Collective.

    Norms are scalars on ``device`` in these dtypes, equal on every rank. Zero if no rank has the gradient. All ranks
    pass the same number of shards; padding is zero and adds nothing.
    """
    present = [(number, shard.detach()) for number, shard in enumerate(shards) if shard is not None]
    # Powers of float32 numbers soon exceed float32's range.
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
