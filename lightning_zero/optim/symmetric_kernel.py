"""A Triton kernel for symmetric products of matrices, such as those by their own transpose.

The kernel computes the blocks on or above the diagonal, and stores each in both places.
:mod:`~lightning_zero.optim.symmetric_products` decides when to use it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.compat.triton_jit import jit, tl


class Blocks(NamedTuple):
    """Sizes of one program's work.

    Attributes:
        rows: Rows and columns of a block of the product.
        inner: Elements of the inner dimension per iteration.
        warps: Warps of a program.
        stages: Iterations whose loads are in flight.
        ratio: Columns of a block per row, 1 or 2; with descriptors.
    """

    rows: int
    inner: int
    warps: int
    stages: int
    ratio: int = 1


# The fastest or nearly the fastest of 14 for all of Llama's shapes on an H200, among them blocks of 128 x 256.
BLOCKS = Blocks(rows=128, inner=64, warps=8, stages=4)


def programs(size: int, rows: int = BLOCKS.rows) -> int:
    """Return the number of programs for one product of ``size`` rows."""
    wide = -(-size // rows)
    return wide * (wide + 1) // 2


@jit
def place_of(tile, size, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block row and block column of a program."""
    # A triangle of `wide` block columns is folded into a rectangle: line r holds the triangle's lines r and wide-1-r
    # (or wide-r if `wide` is odd), which together have one length. So no program starts below the diagonal.
    wide = (size + ROWS - 1) // ROWS
    length = wide + 1 - wide % 2
    line = tile // length
    step = tile % length
    first = step < wide - line
    upper = tl.where(first, line, wide - line - (1 - wide % 2))
    column = tl.where(first, line + step, upper + step - (wide - line))
    return upper, column


@jit
def _upper_blocks(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    base_ptr,
    out_ptr,
    size,
    inner,
    x_batch,
    x_row,
    x_inner,
    alpha,
    beta,
    shift,
    HAS_BASE: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    upper, column = place_of(tl.program_id(0), size, ROWS)
    rows = upper * ROWS + tl.arange(0, ROWS)
    columns = column * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1).to(tl.int64)

    depth = tl.arange(0, INNER)
    x_ptr += batch * x_batch
    y_ptr += batch * x_batch
    left = x_ptr + rows[:, None] * x_row + depth[None, :] * x_inner
    right = y_ptr + columns[None, :] * x_row + depth[:, None] * x_inner
    total = tl.full((ROWS, ROWS), 0.0, tl.float32)
    for begin in range(0, inner, INNER):
        if MASKED:
            valid = depth < inner - begin
            a = tl.load(left, mask=(rows[:, None] < size) & valid[None, :], other=0.0)
            b = tl.load(right, mask=(columns[None, :] < size) & valid[:, None], other=0.0)
        else:
            a = tl.load(left)
            b = tl.load(right)
        total = tl.dot(a, b, total)
        left += INNER * x_inner
        right += INNER * x_inner

    total *= alpha
    line_of, column_of = rows[:, None], columns[None, :]
    inside = (line_of < size) & (column_of < size)
    matrix = batch * size * size
    direct, mirrored = matrix + line_of * size + column_of, matrix + column_of * size + line_of
    if HAS_BASE:
        base = tl.load(base_ptr + direct, mask=inside, other=0.0) if MASKED else tl.load(base_ptr + direct)
        total += beta * base.to(tl.float32)
    if column > upper:
        result = total.to(out_ptr.dtype.element_ty)
        if MASKED:
            tl.store(out_ptr + direct, result, mask=inside)
            tl.store(out_ptr + mirrored, result, mask=inside)
        else:
            tl.store(out_ptr + direct, result)
            tl.store(out_ptr + mirrored, result)
    else:
        # A block on the diagonal computes both halves. Each element is stored once, so both halves agree to the bit.
        result = (total + tl.where(line_of == column_of, shift, 0.0)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + direct, result, mask=inside & (line_of <= column_of))
        tl.store(out_ptr + mirrored, result, mask=inside & (line_of < column_of))


def factor_and_result(x: Tensor, y: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the second factor of a symmetric product, and the memory of its result."""
    if out is None:
        out = torch.empty(x.size(0), x.size(1), x.size(1), dtype=x.dtype, device=x.device)
    y = x if y is None else y
    assert y.stride() == x.stride(), "the factors of a symmetric product have the same strides"
    assert out.is_contiguous(), "the kernel stores contiguous matrices"
    return y, out


def symmetric_product(
    x: Tensor,
    y: Tensor | None,
    base: Tensor | None,
    alpha: float,
    beta: float,
    shift: float,
    out: Tensor | None = None,
    blocks: Blocks = BLOCKS,
) -> Tensor:
    """Return ``alpha * x @ y.mT + beta * base + shift * I`` in the dtype of ``x``, accumulated in float32.

    Args:
        x: Matrices of shape (number, size, inner), with any strides.
        y: Matrices of the same shape and strides; the product is computed above the diagonal, and mirrored. None: x.
        base: Symmetric matrices of shape (number, size, size), contiguous; None: zeros.
        out: The result's memory, contiguous; None: new memory.
    """
    number, size, inner = x.shape
    y, out = factor_and_result(x, y, out)
    _upper_blocks[programs(size, blocks.rows), number](
        x,
        y,
        out if base is None else base,
        out,
        size,
        inner,
        *x.stride(),
        alpha,
        beta,
        shift,
        HAS_BASE=base is not None,
        MASKED=size % blocks.rows != 0 or inner % blocks.inner != 0,
        ROWS=blocks.rows,
        INNER=blocks.inner,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out
