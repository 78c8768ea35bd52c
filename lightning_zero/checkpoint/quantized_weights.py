"""Read weights that bitsandbytes or torchao has quantized as the values that they stand for.

bitsandbytes stores codes under a weight's key, and scales under keys that begin with it. torchao describes its tensors
in a file's metadata. :func:`dequantized` replaces these keys by one lazily read weight for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.integrity import parse_json
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor
from lightning_zero.compat.torchao_private import TENSOR_DATA, TENSOR_PARTS, TENSOR_TYPE
from lightning_zero.errors import CheckpointError

_DECODED_AT_ONCE = 1 << 22  # elements; bounds temporary memory to about 30 times as many bytes
_BNB_4BIT = ".quant_state.bitsandbytes__"
_INT8_LEVELS = 127  # of bitsandbytes' LLM.int8()
Rows = Callable[[int, int], Tensor]  # returns the values of rows, in float32


class DecodedTensor:
    """A tensor whose rows are decoded when they are copied.

    Args:
        rows: returns the values of flattened elements of a range of rows.
    """

    def __init__(self, shape: torch.Size, rows: Rows) -> None:
        self._shape, self._rows = shape, rows

    def copy(self, index: tuple[slice, ...], into: Tensor) -> None:
        """Do ``into.copy_(self[index])``."""
        begin, end, _ = index[0].indices(self._shape[0])
        inner = self._shape[1:]
        count = max(_DECODED_AT_ONCE // max(inner.numel(), 1), 1)
        for at in range(begin, end, count):
            stop = min(at + count, end)
            values = self._rows(at, stop).view(stop - at, *inner)
            into[at - begin : stop - begin].copy_(values[(slice(None), *index[1:])])


def torchao_descriptions(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return torchao's descriptions of a file's tensors by name; empty for metadata of other packages."""

    def parse(text: str | None) -> Any:
        try:
            return None if text is None else parse_json(text)
        except ValueError:
            return None

    names = parse(metadata.get("tensor_names"))
    if not isinstance(names, list):
        return {}
    found = {name: parse(metadata.get(name)) for name in names if isinstance(name, str)}
    return found if any(isinstance(one, dict) and TENSOR_TYPE in one for one in found.values()) else {}


def dequantized(found: dict[str, CheckpointTensor], descriptions: Mapping[str, Any]) -> dict[str, CheckpointTensor]:
    """Return the tensors by key, with one tensor of values in place of the keys of each quantized weight.

    Args:
        descriptions: of :func:`torchao_descriptions`, for all files.

    Raises:
        CheckpointError: a weight lacks a part, or has a format that is not known here.
    """
    kept = dict(found)
    try:
        for key in found:
            name, mark, kind = key.partition(_BNB_4BIT)
            if mark:
                kept[name] = _bnb_4bit(name, kind, kept)
            elif key.endswith(".SCB") and (name := key.removesuffix("SCB") + "weight") in kept:
                kept[name] = _bnb_int8(name, key, kept)
        for name, described in descriptions.items():
            if described[TENSOR_TYPE] != "Tensor":
                kept[name] = _torchao(name, described[TENSOR_TYPE], described, kept)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"The description of a quantized weight cannot be read: {error!r}.") from error
    return kept


def _lazy(name: str, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Rows]) -> CheckpointTensor:
    return CheckpointTensor(name, shape, dtype, [(Box.whole(shape), lambda: DecodedTensor(shape, read()))])


def _take(name: str, key: str, kept: dict[str, CheckpointTensor]) -> CheckpointTensor:
    if key not in kept:
        raise CheckpointError(f"The quantized weight {name!r} lacks {key!r}. Download the files again.")
    return kept.pop(key)


def _check(name: str, condition: bool) -> None:
    if not condition:
        raise CheckpointError(f"The parts of the quantized weight {name!r} do not fit each other. Download it again.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


# -- bitsandbytes


def _bnb_4bit(name: str, kind: str, kept: dict[str, CheckpointTensor]) -> CheckpointTensor:
    state = parse_json(bytes(_take(name, name + _BNB_4BIT + kind, kept).full_tensor().tolist()))
    shape, block = torch.Size(state["shape"]), int(state["blocksize"])
    packed, maxima, table = (_take(name, key, kept) for key in (name, f"{name}.absmax", f"{name}.quant_map"))
    nested: tuple[CheckpointTensor, ...] = ()
    if "nested_blocksize" in state:
        nested = _take(name, f"{name}.nested_absmax", kept), _take(name, f"{name}.nested_quant_map", kept)
        inner = state["nested_blocksize"] = min(int(state["nested_blocksize"]), maxima.numel())
        state["nested_offset"] = float(state["nested_offset"])
        _check(name, nested[0].numel() * inner >= maxima.numel() and nested[1].numel() == 256)
    _check(name, block > 0 and block % 2 == 0 and len(shape) > 0 and min(shape) >= 0)
    _check(name, maxima.is_floating_point() != bool(nested))  # codes of maxima are integers
    _check(name, packed.numel() * packed.itemsize == -(-shape.numel() // 2))
    _check(name, maxima.numel() == -(-shape.numel() // block) and table.numel() == 16)
    read = partial(_bnb_4bit_rows, shape, state, packed, maxima, table, nested)
    return _lazy(name, shape, _dtype(state["dtype"]), read)


def _bnb_4bit_rows(
    shape: torch.Size,
    state: Mapping[str, Any],
    packed: CheckpointTensor,
    absmax: CheckpointTensor,
    quant_map: CheckpointTensor,
    nested: Sequence[CheckpointTensor],
) -> Rows:
    """Read codes and maxima, and return the function that decodes rows."""
    codes = packed.full_tensor().view(-1).view(torch.uint8)  # of any dtype in the file (bnb_4bit_quant_storage)
    maxima, table = absmax.full_tensor(), quant_map.full_tensor()
    if nested:
        scales, levels = (part.full_tensor() for part in nested)
        scales = scales.repeat_interleave(state["nested_blocksize"])[: len(maxima)]
        maxima = levels[maxima.int()] * scales + state["nested_offset"]
    block, inner = int(state["blocksize"]), shape[1:].numel()

    def rows(begin: int, end: int) -> Tensor:
        first, last = begin * inner, end * inner
        start = first // block * block  # blocks may cross rows
        pairs = codes[start // 2 : -(-last // 2)]
        values = table[torch.stack([pairs >> 4, pairs & 15], 1).view(-1).int()]
        sizes = maxima[start // block : -(-last // block)].repeat_interleave(block)[: len(values)]
        return (values * sizes)[first - start : last - start]

    return rows


def _bnb_int8(name: str, key: str, kept: dict[str, CheckpointTensor]) -> CheckpointTensor:
    codes, scales, layout = kept[name], kept.pop(key), kept.pop(key.removesuffix("SCB") + "weight_format", None)
    if layout is not None and int(layout.full_tensor()) != 0:
        raise CheckpointError(
            f"{name!r} was saved by bitsandbytes in the layout of one kind of GPU. Save it again with a newer version."
        )
    _check(name, codes.dtype is torch.int8 and codes.dim() == 2 and scales.numel() == len(codes))
    return _lazy(name, codes.shape, torch.float32, partial(_scaled_rows, codes, scales, None, 1 / _INT8_LEVELS))


# -- torchao


def _torchao(name: str, kind: str, described: Any, kept: dict[str, CheckpointTensor]) -> CheckpointTensor:
    others = {*described[TENSOR_PARTS]} - {"qdata", "scale", "zero_point"}
    if kind != "Int8Tensor" or others:
        raise CheckpointError(
            f"{name!r} is a {kind} of torchao{' with ' if others else ''}{', '.join(sorted(others))}, which is not "
            "read here: only Int8Tensor of weights is. Quantize the original model by ZeroStrategy(frozen_dtype=...)."
        )
    path, _, last = name.rpartition(".")
    prefix = f"{path}._{last}_" if path else f"_{last}_"
    codes, scales = _take(name, f"{prefix}qdata", kept), _take(name, f"{prefix}scale", kept)
    zeros = _take(name, f"{prefix}zero_point", kept) if "zero_point" in described[TENSOR_PARTS] else None
    blocks = scales.shape if scales.dim() == 2 else (scales.numel(), 1)
    _check(name, codes.dim() == 2 and (zeros is None or zeros.numel() == scales.numel()))
    _check(name, all(count and size % count == 0 for size, count in zip(codes.shape, blocks, strict=True)))
    dtype = _dtype(described[TENSOR_DATA]["dtype"][TENSOR_DATA])
    return _lazy(name, codes.shape, dtype, partial(_scaled_rows, codes, scales, zeros, 1.0))


def _scaled_rows(codes: CheckpointTensor, scales: CheckpointTensor, zero: CheckpointTensor | None, step: float) -> Rows:
    """Read 2-D codes, and the scales of equal rectangles, and return the function that decodes rows.

    ``zero``: codes of zero of the rectangles; None: 0.
    """
    values, factors = codes.full_tensor(), scales.full_tensor().float()
    factors = factors if factors.dim() == 2 else factors.view(-1, 1)
    zeros = torch.zeros_like(factors) if zero is None else zero.full_tensor().float().view(factors.shape)
    height, width = (size // max(count, 1) for size, count in zip(values.shape, factors.shape, strict=True))

    def rows(begin: int, end: int) -> Tensor:
        lines = torch.arange(begin, end) // max(height, 1)
        origin, factor = (blocks[lines].repeat_interleave(width, 1) for blocks in (zeros, factors))
        return (values[begin:end].float() - origin) * factor * step

    return rows
