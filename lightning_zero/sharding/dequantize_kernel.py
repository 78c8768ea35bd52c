"""Triton kernels that compute packed frozen weights.

A thread reads a word of codes, its maximum and its scale once for all elements of the word, and eager code needs no
memory but the result's. Values are those of ``weight_format.decode``, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without Triton
    triton = None

# With one word for each thread, the elements of a thread are contiguous without an exchange between threads.
WARPS = 4
WORDS = 32 * WARPS
INT8_ELEMENTS = 2048  # of one program


@triton.jit if triton is not None else lambda kernel: kernel
def _nf4(  # type: ignore[no-untyped-def]
    packed_ptr,
    out_ptr,
    words,
    numel,
    maxima_begin,
    scales_begin,
    table_begin,
    BLOCK_WORDS: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    STEP: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    codes = tl.load(packed_ptr + word, mask=word < words, other=0) if MASKED else tl.load(packed_ptr + word)
    block = word // BLOCK_WORDS
    inside = word < words
    maxima_ptr = (packed_ptr + maxima_begin).to(tl.pointer_type(tl.uint8))
    scales_ptr = (packed_ptr + scales_begin).to(tl.pointer_type(tl.float32))
    maximum = tl.load(maxima_ptr + block, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + block // BLOCKS_PER_SCALE, mask=inside, other=0.0)
    factor = maximum * maximum * scale * STEP
    field = tl.arange(0, 8)
    code = (codes[:, None] >> (4 * field)[None, :]) & 15
    table_ptr = (packed_ptr + table_begin).to(tl.pointer_type(tl.float32))
    value = tl.load(table_ptr + code) * factor[:, None]
    element = word.to(tl.int64)[:, None] * 8 + field[None, :]
    out = value.to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + element, out, mask=element < numel)
    else:
        tl.store(out_ptr + element, out)


@triton.jit if triton is not None else lambda kernel: kernel
def _int8(  # type: ignore[no-untyped-def]
    packed_ptr, out_ptr, columns, maxima_begin, ZERO: tl.constexpr, STEP: tl.constexpr, ELEMENTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = column < columns
    codes_ptr = packed_ptr.to(tl.pointer_type(tl.uint8)) + row * columns
    maximum = tl.load((packed_ptr + maxima_begin).to(tl.pointer_type(tl.float32)) + row)
    code = tl.load(codes_ptr + column, mask=inside, other=0).to(tl.int32) - ZERO
    value = code.to(tl.float32) * maximum * STEP
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def is_available(device: torch.device) -> bool:
    """Return True if the kernels run on this device."""
    return triton is not None and device.type == "cuda"


def nf4_values(
    packed: Tensor, shape: tuple[int, int], dtype: torch.dtype, sizes: tuple[int, ...], levels: int, group: int
) -> Tensor:
    """Return the weight of packed NF4 codes.

    Args:
        sizes: int32 words of codes, maxima and scales; the table follows them.
        levels: codes of a maximum above zero; a maximum is proportional to the square of its code.
        group: blocks of 64 elements with one scale.
    """
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    words, maxima, scales = sizes[:3]
    _nf4[(triton.cdiv(words, WORDS),)](
        packed,
        out,
        words,
        out.numel(),
        words,
        words + maxima,
        words + maxima + scales,
        BLOCK_WORDS=8,
        BLOCKS_PER_SCALE=group,
        STEP=1 / levels**2,
        WORDS=WORDS,
        MASKED=words % WORDS != 0 or out.numel() % 8 != 0,
        num_warps=WARPS,
    )
    return out


def int8_values(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype, levels: int) -> Tensor:
    """Return the weight of packed int8 codes. ``levels``: the code of zero, and the largest magnitude."""
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    rows, columns = shape
    _int8[rows, triton.cdiv(columns, INT8_ELEMENTS)](
        packed,
        out,
        columns,
        -(-rows * columns // 4),
        ZERO=levels,
        STEP=1 / levels,
        ELEMENTS=INT8_ELEMENTS,
        num_warps=WARPS,
    )
    return out
