"""Checksums of files: XXH3 with 128 bits, which finds damage, and is no proof against somebody who forges it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import RawIOBase, UnsupportedOperation
from types import TracebackType
from typing import Any, BinaryIO

import xxhash

from lightning_zero.checkpoint.disk import Disk, in_blocks, write_all

__all__ = ["FileChecksum", "ChecksumWriter", "digest_of", "checksum_of"]

BLOCK = 4 << 20  # bytes


@dataclass(frozen=True)
class FileChecksum:
    """What a file must be.

    Attributes:
        bytes: its size.
        xxh3_128: its checksum, in hexadecimal digits.
    """

    bytes: int
    xxh3_128: str

    as_dict = asdict


class ChecksumWriter(RawIOBase):
    """A file that is written from its beginning to its end, and summed up meanwhile. When it is closed without an
    error, its bytes are on the disk, and not only in the system's memory, where there is a disk.

    Args:
        file: open for writing; closed with this object.
        wrote: is told how many bytes more are written.
    """

    def __init__(self, file: BinaryIO, wrote: Callable[[int], None] = lambda count: None) -> None:
        self._file, self._wrote = file, wrote
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._failed: OSError | None = None
        self._disk: Disk | None = None
        with suppress(UnsupportedOperation, AttributeError):  # a file in memory, or in an object store
            self._disk = Disk(file.fileno())

    def write(self, data: Any) -> int:
        """All of ``data``, which has the buffer protocol."""
        view = memoryview(data).cast("B")
        for block in in_blocks(view):
            self._write(block)
        return len(view)

    def _write(self, view: memoryview) -> None:
        self._hash.update(view)
        try:
            write_all(self._file, view)
        except OSError as error:
            self._failed = error
            raise
        self._bytes += len(view)
        if self._disk is not None:
            self._disk.follow(len(view))
        self._wrote(len(view))

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    @property
    def sum(self) -> FileChecksum:
        return FileChecksum(self._bytes, self._hash.hexdigest())

    def __enter__(self) -> ChecksumWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                if self._disk is not None:
                    self._disk.settle(lambda: self._wrote(0))
        finally:
            self._file.close()
        if self._failed is not None and error not in (None, self._failed):
            raise self._failed from error  # torch.save tells of it as a position that is not expected


def checksum_of(file: BinaryIO, read: Callable[[int], None] = lambda count: None) -> FileChecksum:
    """Of a whole file, open for reading.

    Args:
        file: is read to its end.
        read: is told after each block how many bytes it had.
    """
    found, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(BLOCK))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        found.update(block[:count])
        size += count
        read(count)
    return FileChecksum(size, found.hexdigest())


def digest_of(data: bytes) -> str:
    """The checksum of ``data``, in hexadecimal digits."""
    return xxhash.xxh3_128(data).hexdigest()
