"""Values that lie in a file as they are, read out of it by the ranges that a rank wants.

Files are read with a few large reads in flight. Mapped memory is slower, 5 GiB/s beside 9 out of the page cache, 1.5
beside 2.2 from a disk, since the system maps each page of the file first. And a file that is cut off meanwhile ends a
read early, where it ends whoever reads such memory.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.chunked_io import read_in_chunks
from lightning_zero.sharding.tensor_extent import should_read_gaps, extent

__all__ = ["BLOCK", "RangeReader", "Placed", "Ranges", "bytes_of_memory"]

BLOCK = 4 << 20  # bytes of one read
THREADS = 4


class Ranges(Protocol):
    """A file, or an object of a store."""

    def read(self, begin: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes from ``begin`` on.

        Raises:
            CheckpointError: it ends before, or cannot be read any more.
        """


class RangeReader:
    """Of a file on a file system of this host: the one that was opened, whatever takes its place.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path, self._number = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def read(self, begin: int, into: memoryview) -> None:
        read_in_chunks(len(into), BLOCK, THREADS, lambda at, end: self._read_block(begin + at, into[at:end]))

    def _read_block(self, begin: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._number, [into[done:]], begin + done)
            except OSError as error:
                raise self._failed(os.strerror(error.errno or 0)) from error
            if not count:
                raise self._failed(f"it ends at {begin + done:,} bytes")
            done += count

    def _failed(self, why: str) -> CheckpointError:
        path = self._path
        with suppress(OSError):  # where a folder is held, the path that was given tells users nothing
            path = os.readlink(f"/proc/self/fd/{self._number}")
        return CheckpointError(
            f"{path} was cut off, or its disk is gone, while it was being read ({why}). Use another checkpoint."
        )


class Placed:
    """A tensor that lies in a file.

    Args:
        ranges: of the file.
        start: the position of its first element, in bytes.
        dtype: its own.
        sizes: its own.
        strides: its own; None: it is contiguous.
    """

    def __init__(
        self, ranges: Ranges, start: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int] | None = None
    ) -> None:
        self._ranges, self._start = ranges, start
        about = torch.empty(tuple(sizes), dtype=dtype, device="meta")
        self._about = about if strides is None else about.as_strided(tuple(sizes), tuple(strides))
        self.shape, self.dtype = self._about.shape, dtype

    def copy(self, index: tuple[slice, ...], into: Tensor) -> None:
        """``into.copy_(self[index])``, reading that alone.

        Raises:
            CheckpointError: the file ends before it, or cannot be read any more.
        """
        self._copy(self._about[index], into.detach())

    def _copy(self, about: Tensor, into: Tensor) -> None:
        if not about.numel():
            return
        if not about.is_contiguous() or not into.is_contiguous():
            self._copy_spread(about, into)
            return
        begin, target = self._start + int(about.storage_offset()) * about.itemsize, into.view(-1)
        if type(into) is Tensor and into.device.type == "cpu" and into.dtype == self.dtype:
            self._ranges.read(begin, bytes_of_memory(target))
            return
        count = max(1, min(THREADS * BLOCK // about.itemsize, target.numel()))
        block = torch.empty(count, dtype=self.dtype, pin_memory=into.is_cuda)
        for at in range(0, target.numel(), count):
            piece = target[at : at + count]
            self._ranges.read(begin + at * about.itemsize, bytes_of_memory(block[: piece.numel()]))
            piece.copy_(block[: piece.numel()])

    def _copy_spread(self, about: Tensor, into: Tensor) -> None:
        """With what lies between its elements, unless that is much."""
        span = extent(about.shape, about.stride())
        if should_read_gaps(about, BLOCK):
            flat = torch.empty(span, dtype=self.dtype)
            self._ranges.read(self._start + int(about.storage_offset()) * about.itemsize, bytes_of_memory(flat))
            into.copy_(flat.as_strided(about.shape, about.stride()))
            return
        for row, target in zip(about, into, strict=True):
            self._copy(row, target)


def bytes_of_memory(values: Tensor) -> memoryview:
    """Of a contiguous tensor of the host, which must live as long."""
    count = values.numel() * values.itemsize
    return memoryview((ctypes.c_ubyte * count).from_address(values.data_ptr())).cast("B")
