"""Triton kernels that compute packed frozen weights.

A thread reads a word of codes, its maximum and its scale once for all elements of the word, and eager code needs no
memory but the result's. Values are those of ``weight_format.decode``, to the bit. Kernels for fp8 multiply by a number
before the cast. Transposes are written by tiles, so that threads read and write contiguous memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.triton_jit import jit, tl, triton

# With one word for each thread, the elements of a thread are contiguous without an exchange between threads.
WARPS = 4
WORDS = 32 * WARPS
# Words of each thread in fp8. Four take a quarter fewer instructions for each element than one, counted for sm_90.
FP8_CHUNKS = 4
INT8_ELEMENTS = 2048  # of one program
# A tile of a weight that is written transposed: 128 contiguous bytes of codes of each row, and of fp8 of each column.
TILE_ROWS, TILE_WORDS, TILE_WARPS = 128, 32, 8


@jit
def _block_factors(  # type: ignore[no-untyped-def]
    packed_ptr,
    word,
    inside,
    maxima_begin,
    scales_begin,
    BLOCK_WORDS: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the number by which the block of each word of NF4 codes is multiplied."""
    block = word // BLOCK_WORDS
    maxima_ptr = (packed_ptr + maxima_begin).to(tl.pointer_type(tl.uint8))
    scales_ptr = (packed_ptr + scales_begin).to(tl.pointer_type(tl.float32))
    maximum = tl.load(maxima_ptr + block, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + block // BLOCKS_PER_SCALE, mask=inside, other=0.0)
    return maximum * maximum * scale * STEP


@jit
def _nf4(  # type: ignore[no-untyped-def]
    packed_ptr,
    factor_ptr,
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
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    table_ptr = (packed_ptr + table_begin).to(tl.pointer_type(tl.float32))
    number = 1.0 if factor_ptr is None else tl.load(factor_ptr)
    for chunk in tl.static_range(CHUNKS):
        word = (tl.program_id(0) * CHUNKS + chunk) * WORDS + tl.arange(0, WORDS)
        codes = tl.load(packed_ptr + word, mask=word < words, other=0) if MASKED else tl.load(packed_ptr + word)
        factor = _block_factors(
            packed_ptr, word, word < words, maxima_begin, scales_begin, BLOCK_WORDS, BLOCKS_PER_SCALE, STEP
        )
        field = tl.arange(0, 8)
        code = (codes[:, None] >> (4 * field)[None, :]) & 15
        value = tl.load(table_ptr + code) * factor[:, None]
        if factor_ptr is not None:
            value = value * number
        element = word.to(tl.int64)[:, None] * 8 + field[None, :]
        out = value.to(out_ptr.dtype.element_ty)
        if MASKED:
            tl.store(out_ptr + element, out, mask=element < numel)
        else:
            tl.store(out_ptr + element, out)


@jit
def _int8(  # type: ignore[no-untyped-def]
    packed_ptr,
    factor_ptr,
    out_ptr,
    columns,
    maxima_begin,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = column < columns
    codes_ptr = packed_ptr.to(tl.pointer_type(tl.uint8)) + row * columns
    maximum = tl.load((packed_ptr + maxima_begin).to(tl.pointer_type(tl.float32)) + row)
    code = tl.load(codes_ptr + column, mask=inside, other=0).to(tl.int32) - ZERO
    value = code.to(tl.float32) * maximum * STEP
    if factor_ptr is not None:
        value = value * tl.load(factor_ptr)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _nf4_transposed(  # type: ignore[no-untyped-def]
    packed_ptr,
    factor_ptr,
    out_ptr,
    rows,
    row_words,
    maxima_begin,
    scales_begin,
    table_begin,
    BLOCK_WORDS: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (column_word < row_words)[None, :]
    word = row[:, None] * row_words + column_word[None, :]
    # As int64, Triton 3.6 exchanges codes between threads, and otherwise eight times as many pointers into the table.
    codes = tl.load(packed_ptr + word, mask=inside, other=0).to(tl.int64)
    block_factor = _block_factors(
        packed_ptr, word, inside, maxima_begin, scales_begin, BLOCK_WORDS, BLOCKS_PER_SCALE, STEP
    )
    factor = tl.load(factor_ptr)
    table_ptr = (packed_ptr + table_begin).to(tl.pointer_type(tl.float32))
    for field in tl.static_range(8):
        value = tl.load(table_ptr + ((codes >> (4 * field)) & 15)) * block_factor * factor
        column = (column_word * 8 + field).to(tl.int64)
        tl.store(out_ptr + column[None, :] * rows + row[:, None], value.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _int8_transposed(  # type: ignore[no-untyped-def]
    packed_ptr,
    factor_ptr,
    out_ptr,
    rows,
    row_words,
    maxima_begin,
    ZERO: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (column_word < row_words)[None, :]
    codes = tl.load(packed_ptr + row[:, None] * row_words + column_word[None, :], mask=inside, other=0)
    maxima_ptr = (packed_ptr + maxima_begin).to(tl.pointer_type(tl.float32))
    maximum = tl.load(maxima_ptr + row, mask=row < rows, other=0.0)[:, None]
    factor = tl.load(factor_ptr)
    for field in tl.static_range(4):
        value = (((codes >> (8 * field)) & 255) - ZERO).to(tl.float32) * maximum * STEP * factor
        column = (column_word * 4 + field).to(tl.int64)
        tl.store(out_ptr + column[None, :] * rows + row[:, None], value.to(out_ptr.dtype.element_ty), mask=inside)


def is_available(device: torch.device) -> bool:
    """Return True if the kernels run on this device."""
    return triton is not None and device.type == "cuda"


def nf4_values(
    packed: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    levels: int,
    group: int,
    factor: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the weight of packed NF4 codes.

    Args:
        sizes: int32 words of codes, maxima and scales; the table follows them.
        levels: codes of a maximum above zero; a maximum is proportional to the square of its code.
        group: blocks of 64 elements with one scale.
        factor: number by which values are multiplied.
        transposed: return the transpose.
    """
    words, maxima, scales = sizes[:3]
    begins = words, words + maxima, words + maxima + scales
    constants = {"BLOCK_WORDS": 8, "BLOCKS_PER_SCALE": group, "STEP": 1 / levels**2}
    if transposed and factor is not None and shape[1] % 8 == 0:
        return _by_tiles(_nf4_transposed, packed, factor, shape, dtype, shape[1] // 8, begins, constants)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    chunks = 1 if factor is None else FP8_CHUNKS
    _nf4[(triton.cdiv(words, WORDS * chunks),)](
        packed,
        factor,
        out,
        words,
        out.numel(),
        *begins,
        **constants,
        WORDS=WORDS,
        CHUNKS=chunks,
        MASKED=words % (WORDS * chunks) != 0 or out.numel() % 8 != 0,
        num_warps=WARPS,
    )
    return out.t().contiguous() if transposed else out


def int8_values(
    packed: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    levels: int,
    factor: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the weight of packed int8 codes.

    Args:
        levels: the code of zero, and the largest magnitude.
        factor: number by which values are multiplied.
        transposed: return the transpose.
    """
    rows, columns = shape
    constants = {"ZERO": levels, "STEP": 1 / levels}
    begin = -(-rows * columns // 4)
    if transposed and factor is not None and columns % 4 == 0:
        return _by_tiles(_int8_transposed, packed, factor, shape, dtype, columns // 4, (begin,), constants)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    _int8[rows, triton.cdiv(columns, INT8_ELEMENTS)](
        packed, factor, out, columns, begin, **constants, ELEMENTS=INT8_ELEMENTS, num_warps=WARPS
    )
    return out.t().contiguous() if transposed else out


def _by_tiles(
    kernel: Any,
    packed: Tensor,
    factor: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    row_words: int,
    begins: tuple[int, ...],
    constants: dict[str, Any],
) -> Tensor:
    """Return the transpose of a weight whose rows are whole words."""
    rows, columns = shape
    out = torch.empty((columns, rows), dtype=dtype, device=packed.device)
    kernel[triton.cdiv(rows, TILE_ROWS), triton.cdiv(row_words, TILE_WORDS)](
        packed,
        factor,
        out,
        rows,
        row_words,
        *begins,
        **constants,
        ROWS=TILE_ROWS,
        WORDS=TILE_WORDS,
        num_warps=TILE_WARPS,
    )
    return out
