"""Where values lie in a file, which are read from there, and not through ``torch.load``, which copies them twice."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HEADER", "header_length", "lies_plainly", "start_of"]

# Of the header before each part of a zip archive: 26 bytes, then the lengths of its name and of what else stands there.
HEADER, LENGTHS = 30, struct.Struct("<26xHH")


def start_of(part: Any, offset: int, count: int) -> int:
    """Where in a file the values of the one tensor begin, contiguous, that ``torch.save`` has written at ``offset``.

    Args:
        part: that piece of the file, open for reading.
        offset: its position, in bytes.
        count: bytes of the tensor.

    Raises:
        ValueError: something else lies there.
    """
    with zipfile.ZipFile(part) as archive:
        found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(found) != 1 or found[0].file_size != count or found[0].compress_type:
        raise ValueError(f"something else lies at {offset}")
    begin = found[0].header_offset
    part.seek(begin)
    return offset + begin + header_length(part.read(HEADER))


def header_length(header: bytes) -> int:
    """Bytes before the contents of a part of an archive, which begins with ``header``, the first 30 of them."""
    name, extra = LENGTHS.unpack(header)
    return HEADER + name + extra


def lies_plainly(part: Any, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Whether one contiguous tensor, of this host's byte order, is all that ``torch.save`` has put into a piece of a
    file. Its values are not read.

    Args:
        part: the piece, open for reading.
        dtype: of the tensor.
        sizes: of the tensor.
    """
    try:
        with zipfile.ZipFile(part) as archive:
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            if any(archive.read(name).decode() != sys.byteorder for name in orders):
                return False
        part.seek(0)
        value = torch.load(part, map_location="meta", weights_only=True)
    except Exception:  # whoever reads it says what is wrong
        return False
    return (
        type(value) is Tensor
        and (value.dtype, value.shape) == (dtype, torch.Size(sizes))
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() == value.numel() * value.itemsize
    )
