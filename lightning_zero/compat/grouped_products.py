"""Make autocast cover grouped products: groups of rows times one matrix each, as for experts.

Autocast casts the operands of ``mm`` and ``bmm``. torch 2.11 to 2.15 has no such rule for ``_grouped_mm``, which is
``torch.nn.functional.grouped_mm``. Experts with float32 weights then compute in float32. They cannot be compiled: the
op's fake implementation takes bfloat16 only. transformers avoids that error by a loop over experts, an op that copies
the groups' sizes to the host. Here both ops get the rule of ``bmm``. The loop becomes the grouped product, whose sizes
stay on the device.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from lightning_zero.compat.lookup import private

# True if an op has a kernel for a dispatch key; a torch that has a rule of its own keeps it. (torch 2.11+)
has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")
# The op of torch.nn.functional.grouped_mm. (torch 2.11+)
grouped_mm = private("torch.ops.aten._grouped_mm.default")

_KEYS = ("AutocastCPU", "AutocastCUDA")
_TRANSFORMERS = "transformers.integrations.moe"


def cast_grouped_products() -> None:
    """Register the rules in this process, once.

    They hold under ``torch.autocast(dtype=torch.bfloat16)``. A further call adds them to what was imported meanwhile.
    """
    _cast_in("aten", "_grouped_mm", _grouped_mm)
    if _TRANSFORMERS in sys.modules and hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        _cast_in("transformers", "grouped_mm_fallback", _grouped_mm_of_transformers)


@cache
def _cast_in(namespace: str, op: str, function: object) -> list[Library]:
    """Return what keeps the rules alive."""
    libraries = []
    for key in _KEYS:
        if not has_kernel(f"{namespace}::{op}", key):
            library = Library(namespace, "IMPL")
            library.impl(op, function, key)
            libraries.append(library)
    return libraries


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    device = a.device.type
    if torch.get_autocast_dtype(device) is torch.bfloat16 and a.is_floating_point() and b.is_floating_point():
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
    with torch.autocast(device, enabled=False):
        return grouped_mm(a, b, offs, bias, out_dtype)


def _grouped_mm_of_transformers(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    device = a.device.type
    if torch.get_autocast_dtype(device) is torch.bfloat16:
        return _grouped_mm(a, b, offs)
    with torch.autocast(device, enabled=False):
        return torch.ops.transformers.grouped_mm_fallback(a, b, offs)
