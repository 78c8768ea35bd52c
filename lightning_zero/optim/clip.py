"""The norm of sharded gradients, and clipping by it. One all-reduce of one number; nothing is read on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.sharding.refusals import on_plain_tensors

__all__ = ["clip_by_norm", "clip_factor", "global_norm", "norm_dtype"]


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """In what norms over all of these are added up: float64 if one of them is that, else float32."""
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


def clip_factor(squared_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """By what gradients are multiplied: ``min(1, max_norm / (norm + 1e-6))``, as in
    ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)


@on_plain_tensors
def global_norm(params: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of all ranks' gradient shards together: a scalar on ``device``, the same on every rank; float32,
    or float64 if a parameter is that. Collective.

    Padding is zero and adds nothing. Parameters without a gradient add nothing.
    """
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    local = torch.nn.utils.get_total_norm(grads, norm_type=2.0) if grads else torch.zeros(())
    squared = local.to(device=device, dtype=norm_dtype(params)).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt()


@on_plain_tensors
def clip_by_norm(params: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Scales gradients in place so that their global norm is at most ``max_norm``; returns the norm before. Collective.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    params = list(params)
    norm = global_norm(params, group, device)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
