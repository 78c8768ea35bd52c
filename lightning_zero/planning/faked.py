"""A module whose parameters and buffers have shapes and no memory, for as long as a plan is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.compat.tensors import FakeTensorMode, tree_map

__all__ = ["faked", "faked_batch"]


@contextmanager
def faked(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, all parameters and buffers of ``module`` are fake ones on the CPU, tied as they were; afterwards it has
    its own again.

    Args:
        dtype: of floating point values; None for their own.
    """
    twins: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for owner in module.modules():
            params = owner.named_parameters(recurse=False, remove_duplicate=False)
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in [*params, *buffers]:
                if id(tensor) not in twins:
                    twins[id(tensor)] = _twin(tensor, mode, dtype)
                replaced.append((owner, name, tensor))
                setattr(owner, name, twins[id(tensor)])
        yield
    finally:
        for owner, name, tensor in replaced:
            setattr(owner, name, tensor)


def faked_batch(batch: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Any:
    """The same containers of fake tensors on the CPU."""

    def fake(value: Any) -> Any:
        return _twin(value, mode, dtype) if isinstance(value, Tensor) else value

    return tree_map(fake, batch)


def _twin(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin
