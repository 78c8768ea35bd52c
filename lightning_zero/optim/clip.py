"""Clipping by the norm of sharded gradients. Nothing is read on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_factor", "norm_dtype"]


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of sums over these tensors: float64 if one has it, else float32."""
    return torch.float64 if any(tensor.dtype.to_real() is torch.float64 for tensor in tensors) else torch.float32


def clip_factor(squared_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
