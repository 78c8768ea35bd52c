"""Symmetric products, such as those by a matrix' own transpose: half of the operations are enough.

On Hopper and Blackwell data-center GPUs with Triton, :func:`symmetric_product` computes only the blocks on or above the
diagonal. Elsewhere, and for small matrices, it calls ``torch.baddbmm``.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Compute capabilities whose blocks may use 227 KiB of shared memory, as the kernel does.
CAPABILITIES = (9, 10)
# Programs that keep the 132 multiprocessors of an H100 or H200 busy for two rounds. With fewer, cuBLAS was faster on an
# H200: it divides a product into smaller blocks.
MIN_PROGRAMS = 264


def symmetric_product(
    x: Tensor,
    y: Tensor | None = None,
    base: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``alpha * x @ y.mT + beta * base + shift * I`` in the dtype of ``x``.

    Args:
        x: Matrices of shape (number, rows, columns), with any strides.
        y: Matrices of the same shape and strides, so that ``x @ y.mT`` is symmetric up to rounding errors; None: ``x``.
        base: Symmetric matrices of shape (number, rows, rows), contiguous; None: zeros.
        out: The result's memory, contiguous; None: new memory.
    """
    if has_kernel(x):
        from lightning_zero.optim import descriptor_kernel, symmetric_kernel

        describes = all(descriptor_kernel.can_describe(each) for each in (x, y, base, out) if each is not None)
        kernel = descriptor_kernel if describes else symmetric_kernel
        return kernel.symmetric_product(x, y, base, alpha, beta, shift, out)
    start = x.new_empty(()) if base is None else base
    if base is not None and not alpha:
        result = base * beta  # torch.baddbmm forgets beta in bfloat16 on CPUs, see findings/
    else:
        result = torch.baddbmm(start, x, (x if y is None else y).mT, beta=0.0 if base is None else beta, alpha=alpha)
    if shift:
        result.diagonal(dim1=-2, dim2=-1).add_(shift)
    if y is not None:
        # Rounding errors of two different matrices are not symmetric, and iterations on Gram matrices amplify that.
        result = result.triu() + result.triu(1).mT
    return result if out is None else out.copy_(result)


def has_kernel(x: Tensor) -> bool:
    """Return True if the kernel computes the products of these matrices."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    from lightning_zero.optim.symmetric_kernel import programs  # imports Triton

    return (
        x.size(0) * programs(x.size(1)) >= MIN_PROGRAMS
        # The kernel computes offsets in one matrix in 32 bits.
        and max(x.size(1) * x.size(1), x.size(1) * x.size(2)) < 2**31
        and can_launch(x.device)
    )


@cache
def can_launch(device: torch.device) -> bool:
    """Return True if Triton's kernels are used on this GPU."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return False
    from lightning_zero.compat.triton_jit import triton

    return triton is not None
