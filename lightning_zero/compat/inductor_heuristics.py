"""Choices of Inductor's that only speed depends on, and that it holds to by guards where sizes are symbols.
For another length, that makes the other choice, everything would be compiled once more.

Both are made for GPUs only: whether a product is padded (torch 2.11, where neither side of a comparison is a number
yet: 640 tokens first, 128 later, of a vocabulary that is odd), and whether sums over rows and over columns share a
kernel (2.11 to 2.13: whether they read more than 5 Mi elements, or 4096 rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch, swap_attribute

scheduler = module("torch._inductor.scheduler")
pad_mm = module("torch._inductor.fx_passes.pad_mm")
# Inductor's state while it compiles a graph. (torch 2.11+)
V = private("torch._inductor.virtualized.V")

__all__ = ["choose_by_hints"]

_CHOICES = Patch(
    "Inductor's choices of kernels do not cause recompilations for other sizes",
    {
        # Decides if padding a matrix product can save time. (torch 2.11+)
        "torch._inductor.fx_passes.pad_mm.is_mm_compute_bound": "M, K, N, dtype",
        # Decides if two reductions share a kernel. (torch 2.11+)
        "torch._inductor.scheduler.MixOrderReduction.can_fuse": "node1, node2",
    },
)


@_CHOICES
@contextmanager
def choose_by_hints() -> Iterator[None]:
    """Inside, Inductor makes these choices by the sizes that it sees, for all sizes."""
    bound = pad_mm.is_mm_compute_bound
    fusible = scheduler.MixOrderReduction.can_fuse

    def is_mm_compute_bound(m: Any, k: Any, n: Any, dtype: torch.dtype) -> bool:
        symbols = [size for size in (m, k, n) if isinstance(size, torch.SymInt)]
        if not symbols:
            return bound(m, k, n, dtype)
        with symbols[0].node.shape_env.suppress_guards():
            return bool(bound(m, k, n, dtype))

    def can_fuse(one: Any, other: Any) -> bool:
        with V.graph.sizevars.shape_env.suppress_guards():
            return fusible(one, other)

    with (
        swap_attribute(pad_mm, "is_mm_compute_bound", is_mm_compute_bound),
        swap_attribute(scheduler.MixOrderReduction, "can_fuse", staticmethod(can_fuse)),
    ):
        yield
