"""Products of matrices by their own transpose, which are symmetric: half of the operations are enough.

On Hopper and Blackwell data-center GPUs with Triton, :func:`symmetric_product` computes only the blocks on or above the
diagonal. Elsewhere, and for small matrices, it calls ``torch.baddbmm``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_zero.optim.symmetric_kernel import Blocks

# Rows from which the kernel is used. A smaller product saves less than 37 % of its blocks of 128 x 128, and cuBLAS
# computes a block faster.
MIN_ROWS = 512
# Compute capabilities whose blocks may use 227 KiB of shared memory, as the kernel's larger block sizes do.
CAPABILITIES = (9, 10)
# Programs that keep the 132 multiprocessors of an H100 or H200 busy for two rounds. Fewer are divided better in smaller
# blocks.
BUSY_PROGRAMS = 264


def symmetric_product(
    x: Tensor, base: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, shift: float = 0.0
) -> Tensor:
    """Return ``alpha * x @ x.mT + beta * base + shift * I`` in the dtype of ``x``.

    Args:
        x: Matrices of shape (number, rows, columns), with any strides.
        base: Symmetric matrices of shape (number, rows, rows), contiguous; None: zeros.
    """
    if has_kernel(x):
        from lightning_zero.optim import symmetric_kernel

        return symmetric_kernel.symmetric_product(x, base, alpha, beta, shift, _blocks(x.size(0), x.size(1)))
    out = x.new_empty(()) if base is None else base
    out = torch.baddbmm(out, x, x.mT, beta=beta if base is not None else 0.0, alpha=alpha)
    if shift:
        out.diagonal(dim1=-2, dim2=-1).add_(shift)
    return out


def has_kernel(x: Tensor) -> bool:
    """Return True if the kernel computes the products of these matrices."""
    return (
        x.device.type == "cuda"
        and x.dtype is torch.bfloat16
        and x.size(1) >= MIN_ROWS
        and x.size(0) > 0
        # The kernel computes offsets in one matrix in 32 bits.
        and max(x.size(1) * x.size(1), x.size(1) * x.size(2)) < 2**31
        and _can_launch(x.device)
    )


@cache
def _can_launch(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return False
    from lightning_zero.optim import symmetric_kernel

    return symmetric_kernel.triton is not None


def _blocks(number: int, rows: int) -> Blocks:
    """Return the largest block size that still gives each multiprocessor work."""
    from lightning_zero.optim.symmetric_kernel import SQUARE, WIDE, programs

    return WIDE if number * programs(rows, WIDE) >= BUSY_PROGRAMS else SQUARE
