"""Values where they lie: mapped, and not read through ``torch.load``, which copies them twice."""

from __future__ import annotations

import mmap
import struct
import sys
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

__all__ = ["MappedFiles", "lies_plainly", "map_file"]

# Of the header before each part of a zip archive: 26 bytes, then the lengths of its name and of what else stands there.
HEADER, LENGTHS = 30, struct.Struct("<26xHH")


class MappedFiles:
    """The files of one folder, each mapped once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def values(self, name: str, part: Any, offset: int, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        """The one tensor, contiguous, that ``torch.save`` has written at ``offset`` of a file: a view of the mapping.

        Args:
            name: of the file.
            part: that piece of the file, open for reading.
            offset: its position, in bytes.
            dtype: of the tensor.
            sizes: of the tensor.

        Raises:
            ValueError: something else lies there.
        """
        count = prod(sizes)
        if not count:
            return torch.empty(tuple(sizes), dtype=dtype)
        with zipfile.ZipFile(part) as archive:
            found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        if len(found) != 1 or found[0].file_size != count * dtype.itemsize or found[0].compress_type:
            raise ValueError(f"{name} holds something else at {offset}")
        begin = found[0].header_offset
        part.seek(begin)
        name_length, extra_length = LENGTHS.unpack(part.read(HEADER))
        start = offset + begin + HEADER + name_length + extra_length
        return torch.frombuffer(self._map(name), dtype=dtype, count=count, offset=start).view(tuple(sizes))

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with open(self._folder / name, "rb") as file:
                self._maps[name] = map_file(file)
        return self._maps[name]


def map_file(file: BinaryIO) -> mmap.mmap:
    """All of it. Private, since torch takes no memory that it could not write to; nothing is written."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


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
