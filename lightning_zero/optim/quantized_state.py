"""Optimizer state in 8 bits (``state_dtype="8bit"``): codes of elements and scales of blocks.

A code of one byte is a floating-point number with 3 mantissa bits. It is relative to the largest magnitude of 256
elements, which is the block's scale. Signed state has codes in int8 and 16 octaves. Nonnegative state has codes in
uint8 and 32 octaves. The octaves have an offset, so that code 0 is zero and small values are evenly spaced.

Blocks begin at multiples of 256 elements of the full parameter in memory order, and no rank's shard ends inside one.
So neither values nor checkpoints depend on the number of ranks. Codes of values that were read from codes are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.bf16_state import BLOCK, HALF, LANE, WORD, hash_words
from lightning_zero.sharding.layout import STATE_BLOCK, ShardLayout

SIGNED, NONNEGATIVE = torch.int8, torch.uint8
CODES, SCALES = "_8bit_codes", "_8bit_scales"  # suffixes of the keys that replace a name of the optimizer's state
SCALE_BYTES = 4 / STATE_BLOCK  # for each element
MAX_NUMEL = 1 << 22  # elements that are float32 at a time while state is converted

_SHIFT = 20  # bits of a float32's mantissa below the 3 that codes keep
_LEVELS = {SIGNED: 127, NONNEGATIVE: 255}  # the largest magnitude of a code, which stands for the scale itself
_OCTAVES = {SIGNED: 16, NONNEGATIVE: 32}
_SMALLEST = torch.finfo(torch.float32).tiny


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


_OFFSET = {dtype: 2.0**-octaves for dtype, octaves in _OCTAVES.items()}
_BASE = {dtype: _bits(offset) >> _SHIFT for dtype, offset in _OFFSET.items()}
_TOP = {dtype: torch.tensor((_LEVELS[dtype] + base) << _SHIFT, dtype=torch.int32) for dtype, base in _BASE.items()}
_SPAN = {dtype: float(top.view(torch.float32) - _OFFSET[dtype]) for dtype, top in _TOP.items()}


def keeps_quantized_state(layout: ShardLayout, dtype: torch.dtype) -> bool:
    """Return True if a parameter of this layout and dtype can have 8-bit state."""
    return layout.has_state_blocks and dtype in (torch.float32, torch.float16, torch.bfloat16)


def codes_key(name: str) -> str:
    return name + CODES


def scales_key(name: str) -> str:
    return name + SCALES


def is_stored_key(key: str) -> bool:
    """Return True if the key is that of codes or scales."""
    return key.endswith((CODES, SCALES))


def is_quantized(dtype: torch.dtype | None) -> bool:
    return dtype in _LEVELS


def quantize(values: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of float32 blocks.

    A block with a value that is not finite is NaN as a whole. A positive value never gets the nonnegative code 0,
    because a second moment of zero would make the step of a small first moment very large.

    Args:
        values: Shape (blocks, 256).
        dtype: Of the codes.
        noise: 16 bits for each block, shape (blocks, 1), int32: rounds stochastically. None: to the nearest.

    Returns:
        Codes of the shape of ``values``, and scales of shape (blocks, 1).
    """
    size = values.abs()
    largest = size.amax(1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest, torch.nan)
    # A division for each block, not for each element. The inverse of a subnormal scale would be infinite.
    share = size * torch.where(scale >= _SMALLEST, 1 / scale, 0.0)
    bits = (share * _SPAN[dtype] + _OFFSET[dtype]).view(torch.int32)
    if noise is None:
        bits = bits + (1 << (_SHIFT - 1))
    else:
        lanes = torch.arange(values.shape[1], dtype=torch.int32, device=values.device) * LANE
        # Half a unit of the noise more: a share that rounding has moved by its last bits keeps its code.
        bits = bits + ((noise + lanes) & HALF) * (1 << (_SHIFT - 16)) + (1 << (_SHIFT - 17))
    level = ((bits >> _SHIFT) - _BASE[dtype]).clamp(0, _LEVELS[dtype])
    level = torch.where(size >= scale, _LEVELS[dtype], level)
    if dtype is NONNEGATIVE:
        code = torch.where((size > 0) & (level == 0), 1, level)
    else:
        code = torch.where(values < 0, -level, level)
    return torch.where(scale > 0, code, 0).to(dtype), scale


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 values of the shape of ``codes``, which is (blocks, 256); ``scales`` is (blocks, 1)."""
    dtype = codes.dtype
    level = codes.to(torch.int32).abs()
    shifted = ((level + _BASE[dtype]) << _SHIFT).view(torch.float32)
    share = torch.where(level == _LEVELS[dtype], 1.0, (shifted - _OFFSET[dtype]) * (1 / _SPAN[dtype]))
    return torch.where(codes < 0, -share, share) * scales if dtype is SIGNED else share * scales


def fill_quantized(codes: Tensor, scales: Tensor, value: float) -> None:
    """Set all values to ``value``, which is not rounded."""
    codes.fill_(_LEVELS[codes.dtype] * ((value > 0) - (value < 0)))
    scales.fill_(abs(value))


def block_noise(owners: Tensor, shifts: Tensor, begin: Tensor, keys: Tensor) -> Tensor:
    """Return a hash word for each block, from its ``ElementPositions`` and keys."""
    owner = owners.view(-1, STATE_BLOCK // BLOCK)[:, 0].long()
    numbers = (torch.arange(len(owner), device=owners.device) * STATE_BLOCK + begin + shifts[owner]) & WORD
    return hash_words(numbers ^ keys[owner]).view(-1, 1)


# -- tensors of any length


def pack(values: Tensor, dtype: torch.dtype, codes: Tensor | None = None, scales: Tensor | None = None) -> Any:
    """Return codes of the shape of ``values`` and 1-D scales, rounded to the nearest.

    The last block may be short. ``codes`` and ``scales`` are memory for the result, 1-D.
    """
    flat, numel = values.detach().reshape(-1), values.numel()
    codes = flat.new_empty(numel, dtype=dtype) if codes is None else codes
    scales = flat.new_empty(-(-numel // STATE_BLOCK), dtype=torch.float32) if scales is None else scales
    for begin in range(0, numel, MAX_NUMEL):
        part = flat[begin : begin + MAX_NUMEL].float()
        blocks = torch.nn.functional.pad(part, (0, -len(part) % STATE_BLOCK)).view(-1, STATE_BLOCK)
        found, scale = quantize(blocks, dtype)
        codes[begin : begin + len(part)] = found.view(-1)[: len(part)]
        scales[begin // STATE_BLOCK :][: len(scale)] = scale.view(-1)
    return codes.view(values.shape), scales


def unpack(codes: Tensor, scales: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the float32 values of ``codes``, in their shape.

    ``into`` is memory for them, 1-D and of any dtype.
    """
    flat, numel = codes.detach().reshape(-1), codes.numel()
    into = flat.new_empty(numel, dtype=torch.float32) if into is None else into
    for begin in range(0, numel, MAX_NUMEL):
        part = flat[begin : begin + MAX_NUMEL]
        blocks = torch.nn.functional.pad(part, (0, -len(part) % STATE_BLOCK)).view(-1, STATE_BLOCK)
        scale = scales[begin // STATE_BLOCK :][: len(blocks)].view(-1, 1)
        into[begin : begin + len(part)] = dequantize(blocks, scale).view(-1)[: len(part)]
    return into.view(codes.shape)


# -- entries of an optimizer's state


def quantized_names(entries: Mapping[str, Any]) -> list[str]:
    """Return the names whose codes and scales are among the entries of one parameter's state."""
    names = [key.removesuffix(CODES) for key in entries if key.endswith(CODES)]
    return [name for name in names if scales_key(name) in entries and is_quantized(entries[codes_key(name)].dtype)]


def pack_entries(entries: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace float state by codes and scales, in place, for the names in ``dtypes``."""
    for name, dtype in dtypes.items():
        value = entries.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            entries[codes_key(name)], entries[scales_key(name)] = pack(entries.pop(name), dtype)


def unpack_entries(entries: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Replace codes and scales by values of ``dtype``, in place."""
    for name in quantized_names(entries):
        entries[name] = unpack(entries.pop(codes_key(name)), entries.pop(scales_key(name))).to(dtype)
