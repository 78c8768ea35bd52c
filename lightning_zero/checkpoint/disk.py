"""What is written into a file, on its way to the disk: sent as it comes, and awaited piece by piece, so that those who
wait hear that it goes on. Left to itself a large host begins when all is written, and says nothing until it ends."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, BinaryIO

__all__ = ["Disk", "in_blocks", "write_all"]

AT_ONCE = 16 << 20  # bytes that are written, so that those who wait hear of it now and then
WINDOW = 256 << 20  # bytes that may be on their way
BEFORE, WRITE, AFTER = 1, 2, 4  # SYNC_FILE_RANGE_* of Linux
# By systems and file systems without that call, or rules for containers.
REFUSED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ESPIPE)


def in_blocks(data: memoryview) -> Iterator[memoryview]:
    """Of bytes, as many as are written at once."""
    for begin in range(0, len(data), AT_ONCE):
        yield data[begin : begin + AT_ONCE]


def write_all(file: BinaryIO, data: memoryview) -> None:
    """All of these bytes, however few a file takes at a time.

    Raises:
        OSError: names the file, where it has a name.
    """
    written = 0
    while written < len(data):
        try:
            written += file.write(data[written:])
        except OSError as error:
            raise _naming(error, getattr(file, "name", None)) from error


def _naming(error: OSError, name: object) -> OSError:
    if error.errno is not None:
        return OSError(error.errno, error.strerror or os.strerror(error.errno), name)
    said = str(error) or type(error).__name__  # a store's, which has words and no number
    return OSError(said if name is None else f"{said}: {name!r}")


class Disk:
    """Of one file that is written from its beginning to its end.

    Args:
        number: of the open file.
    """

    def __init__(self, number: int) -> None:
        self._number, self._end, self._on_its_way = number, 0, 0
        self._pieces: deque[tuple[int, int]] = deque()
        self._refused = False

    def follow(self, count: int) -> None:
        """So many bytes more were written. Waits for earlier ones where much is on its way.

        Raises:
            OSError: some of them did not reach the disk.
        """
        self._ask(self._end, count, WRITE)
        self._pieces.append((self._end, count))
        self._end += count
        self._on_its_way += count
        while self._on_its_way > WINDOW:
            self._await()

    def settle(self, came: Callable[[], object]) -> None:
        """Until all is on the disk. ``came`` is called now and then.

        Raises:
            OSError: some of it did not get there.
        """
        while self._pieces:
            self._await()
            came()
        os.fsync(self._number)

    def _await(self) -> None:
        begin, count = self._pieces.popleft()
        self._ask(begin, count, BEFORE | WRITE | AFTER)
        self._on_its_way -= count

    def _ask(self, begin: int, count: int, flags: int) -> None:
        if self._refused or (ask := _sync_file_range()) is None:
            return
        while ask(self._number, ctypes.c_int64(begin), ctypes.c_int64(count), ctypes.c_uint(flags)) != 0:
            found = ctypes.get_errno()
            if found in REFUSED:
                self._refused = True
                return
            if found != errno.EINTR:  # who is told of one here is not told again by fsync()
                raise OSError(found, os.strerror(found))


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
