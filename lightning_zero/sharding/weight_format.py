"""Pack frozen weights into 4-bit or 8-bit codes, and compute weights from them.

A packed weight is one 1-D int32 tensor, so it is sharded and gathered like any other parameter. Shards may cut blocks,
because a weight is decoded after its all-gather. :func:`decode` defines the values. On a GPU, a kernel of
``dequantize_kernel.py`` computes them. Elsewhere eager code runs the ops of ``decode``, and a graph pass inserts them
next to the product. Products in fp8 read it in fp8, multiplied by a number. Its reciprocal follows from the last word,
the largest absolute value of the decoded weight in float32.

``nf4``: flattened blocks of 64 have 4-bit codes of :data:`NF4`. Their absolute maximum is the square of an 8-bit code,
times a bfloat16 scale of 256 blocks. ``int8``: each row has codes from -127 to 127 and one bfloat16 absolute maximum.

Encoding the decoded values again gives the same bytes, also if they were rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library

from lightning_zero.compat.tensors import unsafe_index
from lightning_zero.sharding import dequantize_kernel

WeightKind = Literal["nf4", "int8"]

BLOCK = 64  # elements with one absolute maximum, as in the QLoRA paper
SUPERBLOCK = 256  # blocks whose absolute maxima have one scale, as in the QLoRA paper
# Magnitudes of an int8 code, and codes of an absolute maximum above zero. With at most 7 bits, or 8 bits of a square
# root, half a step is more than the rounding error of bfloat16, so values which were rounded to it have the same codes.
# Maxima are squares so that a block keeps its precision next to one with a maximum 100 times as large.
LEVELS, MAXIMA = 127, 255
# Elements that are encoded at once; bounds temporary memory to about 30 times as many bytes. A multiple of the elements
# of a superblock.
_ENCODED_AT_ONCE = 1 << 22

# The 16 values of NF4: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4 = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.39491749,
    -0.28444138,
    -0.18477343,
    -0.09105004,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
_ZERO = NF4.index(0.0)

_aten, _prims = torch.ops.aten, torch.ops.prims
Call = Callable[..., Any]  # runs an op or inserts it into a graph


@dataclass(frozen=True)
class WeightFormat:
    """Describe how one weight is packed.

    Attributes:
        shape: (rows, columns) of the weight.
        dtype: of the weight that modules read.
    """

    kind: WeightKind
    shape: torch.Size
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """Return the number of int32 elements of the packed weight."""
        return packed_words(self.shape[0], self.shape[1], self.kind)

    def encode(self, weight: Tensor) -> Tensor:
        """Return the packed weight, on the weight's device."""
        with torch.no_grad():
            return _encode_nf4(weight.reshape(-1)) if self.kind == "nf4" else _encode_int8(weight)

    def decode(self, packed: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, by default in its own dtype."""
        with torch.no_grad():
            return _dequantize(packed, list(self.shape), dtype or self.dtype, self.kind)


def packed_words(rows: int, columns: int, kind: str) -> int:
    """Return the number of int32 elements of a packed weight."""
    if kind == "int8":
        return -(-rows * columns // 4) + rows + 1
    blocks = -(-rows * columns // BLOCK)
    return sum(_nf4_sizes(blocks)) + 1


def _nf4_sizes(blocks: int) -> tuple[int, int, int, int]:
    """Return the int32 words of codes, maxima, scales and the table."""
    return blocks * (BLOCK // 8), -(-blocks // 4), -(-blocks // SUPERBLOCK), len(NF4)


def _run(op: Any, *args: Any, **settings: Any) -> Any:
    return op(*args, **settings)


# -- decoding


def decode(
    call: Call,
    packed: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: str,
    device: torch.device,
    factor: Any = None,
    transposed: bool = False,
) -> Any:
    """Return the weight of a packed one; each op goes through ``call``.

    Args:
        factor: float32 number by which float32 values are multiplied before the cast to ``dtype``.
        transposed: return the transpose, contiguous.
    """
    rows, columns = shape
    find = _nf4_values if kind == "nf4" else _int8_values
    values = find(call, packed, rows, columns, device)
    if factor is not None:
        values = call(_aten.mul.Tensor, values, factor)
    values = call(_prims.convert_element_type.default, values, dtype)
    if transposed:
        turned = call(_aten.permute.default, values, [1, 0])
        values = call(_aten.clone.default, turned, memory_format=torch.contiguous_format)
    return values


def largest_value(call: Call, packed: Any, words: int) -> Any:
    """Return the largest absolute value of the float32 weight, a number; each op goes through ``call``."""
    last = call(_aten.slice.Tensor, packed, 0, words - 1, words)
    return call(_aten.view.default, call(_aten.view.dtype, last, torch.float32), [])


def _nf4_values(call: Call, packed: Any, rows: int, columns: int, device: torch.device) -> Any:
    numel = rows * columns
    blocks = -(-numel // BLOCK)
    sizes = _nf4_sizes(blocks)
    codes, maxima, scales, table = _parts(call, packed, sizes)
    table, scales = call(_aten.view.dtype, table, torch.float32), call(_aten.view.dtype, scales, torch.float32)
    values = call(unsafe_index, table, [_fields(call, codes, sizes[0], 4, device)])
    maxima = call(_aten.view.default, _fields(call, maxima, sizes[1], 8, device), [4 * sizes[1]])
    maxima = call(_aten.slice.Tensor, maxima, 0, 0, blocks)
    scales = call(_aten.expand.default, call(_aten.view.default, scales, [sizes[2], 1]), [sizes[2], SUPERBLOCK])
    scales = call(_aten.clone.default, scales, memory_format=torch.contiguous_format)
    scales = call(_aten.view.default, scales, [sizes[2] * SUPERBLOCK])
    scales = call(_aten.slice.Tensor, scales, 0, 0, blocks)
    maxima = call(_prims.convert_element_type.default, maxima, torch.float32)
    maxima = call(_aten.mul.Tensor, call(_aten.mul.Tensor, maxima, maxima), scales)
    maxima = call(_aten.view.default, call(_aten.mul.Tensor, maxima, 1 / MAXIMA**2), [blocks, 1])
    values = call(_aten.mul.Tensor, call(_aten.view.default, values, [blocks, BLOCK]), maxima)
    values = call(_aten.view.default, values, [blocks * BLOCK])
    if blocks * BLOCK > numel:
        values = call(_aten.slice.Tensor, values, 0, 0, numel)
    return call(_aten.view.default, values, [rows, columns])


def _int8_values(call: Call, packed: Any, rows: int, columns: int, device: torch.device) -> Any:
    numel = rows * columns
    words = -(-numel // 4)
    codes, maxima = _parts(call, packed, (words, rows))
    codes = call(_aten.view.default, _fields(call, codes, words, 8, device), [4 * words])
    if 4 * words > numel:
        codes = call(_aten.slice.Tensor, codes, 0, 0, numel)
    codes = call(_aten.sub.Tensor, call(_aten.view.default, codes, [rows, columns]), LEVELS)
    maxima = call(_aten.view.default, call(_aten.view.dtype, maxima, torch.float32), [rows, 1])
    values = call(_aten.mul.Tensor, call(_prims.convert_element_type.default, codes, torch.float32), maxima)
    return call(_aten.mul.Tensor, values, 1 / LEVELS)


def _parts(call: Call, packed: Any, sizes: tuple[int, ...]) -> list[Any]:
    found, begin = [], 0
    for size in sizes:
        found.append(call(_aten.slice.Tensor, packed, 0, begin, begin + size))
        begin += size
    return found


def _fields(call: Call, words: Any, count: int, bits: int, device: torch.device) -> Any:
    """Return the unsigned fields of int32 words, of shape (words, fields)."""
    number = 32 // bits
    shifts = call(
        _prims.iota.default, number, start=0, step=bits, dtype=torch.int32, device=device, requires_grad=False
    )
    words = call(_aten.view.default, words, [count, 1])
    return call(_aten.bitwise_and.Scalar, call(_aten.bitwise_right_shift.Tensor, words, shifts), (1 << bits) - 1)


# -- encoding


def _encode_nf4(flat: Tensor) -> Tensor:
    table = torch.tensor(NF4, dtype=torch.float32, device=flat.device)
    bounds = (table[1:] + table[:-1]) / 2
    codes, maxima, scales, amax = [], [], [], []
    for part in flat.split(_ENCODED_AT_ONCE):
        blocks = _padded(part.float(), BLOCK).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        found = torch.bucketize(blocks / torch.where(largest > 0, largest, 1)[:, None], bounds, out_int32=True)
        grouped = _padded(largest, SUPERBLOCK).view(-1, SUPERBLOCK)
        scale = grouped.amax(1, keepdim=True).bfloat16().float()
        level = _levels(grouped, scale, MAXIMA, squares=True)
        # As in decoding. Each block has the code of -1 or of 1, unless all of its values are zero.
        amax.append((level.float() * level.float() * scale * (1 / MAXIMA**2)).amax())
        level = level.view(-1)[: len(largest)]
        # A block whose maximum is rounded to zero has only zeros, so its codes must be those of zeros.
        found = torch.where((level == 0)[:, None], _ZERO, found)
        codes.append(_pack(found.view(-1), 4))
        maxima.append(level)
        scales.append(scale.view(-1))
    packed = [*codes, _pack(_padded(torch.cat(maxima), 4), 8), torch.cat(scales).view(torch.int32)]
    return torch.cat([*packed, table.view(torch.int32), _word(amax)])


def _encode_int8(weight: Tensor) -> Tensor:
    codes, scales, amax = [], [], []
    for part in weight.split(max(_ENCODED_AT_ONCE // weight.shape[1], 1)):
        rows = part.float()
        scale = rows.abs().amax(1, keepdim=True).bfloat16().float()
        codes.append((_levels(rows, scale) + LEVELS).to(torch.uint8).view(-1))
        scales.append(scale.view(-1))
        amax.append((scale * LEVELS * (1 / LEVELS)).amax())  # as in decoding: each row has the largest code
    packed = _padded(torch.cat(codes), 4).view(-1, 4)
    return torch.cat([_pack(packed.view(-1), 8), torch.cat(scales).view(torch.int32), _word(amax)])


def _word(amax: list[Tensor]) -> Tensor:
    return torch.stack(amax).amax().view(1).view(torch.int32)


def _levels(values: Tensor, scale: Tensor, most: int = LEVELS, squares: bool = False) -> Tensor:
    """Return ``values / scale``, or its square root, in whole levels.

    They are zero if the scale is zero or not a number.
    """
    scale = torch.where(scale > 0, scale, 1)
    levels = (values / scale).sqrt_() * most if squares else values * most / scale
    levels = levels.round_().clamp_(-most, most)
    return levels.nan_to_num_(0.0).to(torch.int32)


def _padded(flat: Tensor, multiple: int) -> Tensor:
    missing = -len(flat) % multiple
    return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words of unsigned codes, the first in the lowest bits."""
    fields = codes.view(-1, 32 // bits).to(torch.int64)
    words = (fields << torch.arange(0, 32, bits, device=codes.device)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


# -- the op of compiled code

_NAMESPACE = "lightning_zero_weights"
_LIBRARY = Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    "dequantize(Tensor packed, int[] shape, ScalarType dtype, str kind, Tensor? factor=None, bool transposed=False) "
    "-> Tensor"
)
DEQUANTIZE = torch.ops.lightning_zero_weights.dequantize.default


def _dequantize(
    packed: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    kind: str,
    factor: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    rows, columns = shape
    if not dequantize_kernel.is_available(packed.device):
        return decode(_run, packed, (rows, columns), dtype, kind, packed.device, factor, transposed)
    if kind == "int8":
        return dequantize_kernel.int8_values(packed, (rows, columns), dtype, LEVELS, factor, transposed)
    sizes = _nf4_sizes(-(-rows * columns // BLOCK))
    return dequantize_kernel.nf4_values(packed, (rows, columns), dtype, sizes, MAXIMA, SUPERBLOCK, factor, transposed)


def _fake(
    packed: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    kind: str,
    factor: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    return packed.new_empty(shape[::-1] if transposed else shape, dtype=dtype)


_LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::dequantize", _fake, lib=_LIBRARY)
