"""One file of safetensors, byte for byte as the library writes it, which says nothing before it is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.behind import WrittenBehind, lasting

__all__ = ["write_tensors"]

ALIGNMENT = 8  # bytes
# In the order in which their tensors come, the last ones first: the larger ones before the smaller.
NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """A new file, on the disk when this returns; one that is there is overwritten.

    Args:
        path: of the file.
        tensors: on the CPU, contiguous, none of which shares memory with another.
        metadata: of the file.
        wrote: is told, from another thread, how many bytes more are written.

    Raises:
        ValueError: the format has no name for a tensor's dtype.
    """
    for key, value in tensors.items():
        if value.dtype not in NAMES:
            instead = "Make it torch.complex64" if value.is_complex() else "Export with dtype="
            raise ValueError(f"safetensors cannot hold {key!r}, of {value.dtype}. {instead}, or leave it out.")
    rank = {dtype: number for number, dtype in enumerate(NAMES)}
    keys = sorted(tensors, key=lambda key: (-rank[tensors[key].dtype], key.encode()))
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key in keys:
        value = tensors[key]
        begin, end = end, end + value.nbytes
        head[key] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    said = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    said += b" " * (-len(said) % ALIGNMENT)
    file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by what writes it
    with WrittenBehind(file, lasting(tensors), wrote) as behind:
        behind.write(len(said).to_bytes(8, "little") + said)
        for key in keys:
            behind.write(tensors[key].reshape(-1).view(torch.uint8).numpy())
