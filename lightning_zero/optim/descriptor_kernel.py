"""The kernel for symmetric products with tensor descriptors.

Hopper's copy engine then loads and stores whole blocks. It needs addresses and strides that are multiples of 16 bytes.
:mod:`~lightning_zero.optim.symmetric_kernel` has the kernel for other matrices, and explains the order of blocks.
"""

from __future__ import annotations

from torch import Tensor

from lightning_zero.compat.triton_jit import TensorDescriptor, jit, tl
from lightning_zero.optim.symmetric_kernel import Blocks, factor_and_result, place_of, programs

# In Muon's step of a 1.36B decoder on an H200, 0.6 % faster than blocks of 128 x 256 with 8 warps and 4 stages.
BLOCKS = Blocks(rows=128, inner=64, warps=4, stages=3)


@jit
def _upper_blocks(  # type: ignore[no-untyped-def]
    x,
    y,
    base,
    out,
    size,
    inner,
    alpha,
    beta,
    shift,
    HAS_BASE: tl.constexpr,
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    INNER: tl.constexpr,
):
    # RATIO neighboring block rows form a line of the triangle, as high as its blocks are wide.
    COLUMNS: tl.constexpr = RATIO * ROWS
    line, column = place_of(tl.program_id(0) // RATIO, size, COLUMNS)
    batch = tl.program_id(1)
    row_begin = (line * RATIO + tl.program_id(0) % RATIO) * ROWS
    column_begin = column * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, INNER):
        if TALL:
            a = x.load([batch, begin, row_begin]).reshape(INNER, ROWS).T
            b = y.load([batch, begin, column_begin]).reshape(INNER, COLUMNS)
        else:
            a = x.load([batch, row_begin, begin]).reshape(ROWS, INNER)
            b = y.load([batch, column_begin, begin]).reshape(COLUMNS, INNER).T
        total = tl.dot(a, b, total)
    if RATIO == 1:
        _store(total, base, out, batch, row_begin, column_begin, alpha, beta, shift, HAS_BASE, ROWS)
    else:
        left, right = total.reshape(ROWS, 2, ROWS).permute(0, 2, 1).split()
        _store(left, base, out, batch, row_begin, column_begin, alpha, beta, shift, HAS_BASE, ROWS)
        _store(right, base, out, batch, row_begin, column_begin + ROWS, alpha, beta, shift, HAS_BASE, ROWS)


@jit
def _store(  # type: ignore[no-untyped-def]
    total, base, out, batch, row_begin, column_begin, alpha, beta, shift, HAS_BASE: tl.constexpr, ROWS: tl.constexpr
):
    """Store a square block that is not below the diagonal, and its mirror image."""
    if column_begin >= row_begin:
        total *= alpha
        if HAS_BASE:
            total += beta * base.load([batch, row_begin, column_begin]).reshape(ROWS, ROWS).to(tl.float32)
        if column_begin > row_begin:
            result = total.to(out.dtype)
            out.store([batch, row_begin, column_begin], result.reshape(1, ROWS, ROWS))
            out.store([batch, column_begin, row_begin], result.T.reshape(1, ROWS, ROWS))
        else:
            # A block on the diagonal computes both halves, of which the upper one is mirrored.
            line = tl.arange(0, ROWS)[:, None]
            other = tl.arange(0, ROWS)[None, :]
            result = (total + tl.where(line == other, shift, 0.0)).to(out.dtype)
            result = tl.where(line <= other, result, result.T)
            out.store([batch, row_begin, column_begin], result.reshape(1, ROWS, ROWS))


def can_describe(x: Tensor) -> bool:
    """Return True if the copy engine can load these matrices, of shape (number, size, inner)."""
    wide = x.mT if x.stride(2) != 1 else x
    return (
        TensorDescriptor is not None
        and wide.stride(2) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in (*wide.stride()[:2], x.size(1)))
    )


def symmetric_product(
    x: Tensor,
    y: Tensor | None,
    base: Tensor | None,
    alpha: float,
    beta: float,
    shift: float,
    out: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Return what the function of this name in ``symmetric_kernel`` returns.

    All matrices must fulfil :func:`can_describe`.
    """
    number, size, inner = x.shape
    blocks = blocks or BLOCKS
    y, out = factor_and_result(x, y, out)
    tall = x.stride(2) != 1

    def describe(matrices: Tensor, rows: int) -> TensorDescriptor:
        box = [1, blocks.inner, rows] if tall else [1, rows, blocks.inner]
        return TensorDescriptor.from_tensor(matrices.mT if tall else matrices, box)

    columns = blocks.ratio * blocks.rows
    square = [1, blocks.rows, blocks.rows]
    described = TensorDescriptor.from_tensor(out, square)
    _upper_blocks[blocks.ratio * programs(size, columns), number](
        describe(x, blocks.rows),
        describe(y, columns),
        described if base is None else TensorDescriptor.from_tensor(base, square),
        described,
        size,
        inner,
        alpha,
        beta,
        shift,
        HAS_BASE=base is not None,
        TALL=tall,
        ROWS=blocks.rows,
        RATIO=blocks.ratio,
        INNER=blocks.inner,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out
