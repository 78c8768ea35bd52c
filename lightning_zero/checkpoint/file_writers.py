"""Writers that flush to the disk while they write, report progress, and compute checksums.

:class:`ChecksumWriter` hashes in the calling thread; :class:`ThreadedWriter` writes in a thread, concurrently with
``torch.save`` computing the next CRC. Both are durable: closed without an error, their bytes are on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from io import RawIOBase, UnsupportedOperation
from types import TracebackType
from typing import Any, BinaryIO

import numpy
import xxhash

from lightning_zero.checkpoint.integrity import FileChecksum, host_storages, tensors_in

WRITE_BYTES = 16 << 20  # of one write, so that progress is reported now and then
WINDOW = 256 << 20  # bytes that are written and not on the disk yet
COPY_BYTES = 1 << 16  # smaller writes are copied into the queue
QUEUE_LENGTH = 1024
BEFORE, WRITE, AFTER = 1, 2, 4  # SYNC_FILE_RANGE_* of Linux
# By systems and file systems without sync_file_range(), or by the rules of containers.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ESPIPE)

OnWrite = Callable[[int], None]


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), WRITE_BYTES):
        yield data[begin : begin + WRITE_BYTES]


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all bytes, even if the file takes fewer at a time.

    Raises:
        OSError: its message names the file if the file has a name.
    """
    written = 0
    while written < len(data):
        try:
            written += file.write(data[written:])
        except OSError as error:
            raise _with_name(error, getattr(file, "name", None)) from error


def _with_name(error: OSError, name: object) -> OSError:
    if error.errno is not None:
        return OSError(error.errno, error.strerror or os.strerror(error.errno), name)
    text = str(error) or type(error).__name__  # an object store's error has no number
    return OSError(text if name is None else f"{text}: {name!r}")


class WritebackQueue:
    """Start the writeback of each range of a file as it is written, and wait for it range by range.

    Without it a large host begins the writeback when all is written, and ``fsync`` reports no progress.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end, self._pending_bytes = descriptor, 0, 0
        self._pending: deque[tuple[int, int]] = deque()
        self._unsupported = False

    def add(self, count: int) -> None:
        """Start the writeback of the next ``count`` bytes, and wait for earlier ones beyond ``WINDOW``."""
        self._sync_range(self._end, count, WRITE)
        self._pending.append((self._end, count))
        self._end += count
        self._pending_bytes += count
        while self._pending_bytes > WINDOW:
            self._wait_first()

    def drain(self, on_progress: Callable[[], object]) -> None:
        """Wait until all is on the disk; call ``on_progress`` now and then."""
        while self._pending:
            self._wait_first()
            on_progress()
        os.fsync(self._descriptor)

    def _wait_first(self) -> None:
        begin, count = self._pending.popleft()
        self._sync_range(begin, count, BEFORE | WRITE | AFTER)
        self._pending_bytes -= count

    def _sync_range(self, begin: int, count: int, flags: int) -> None:
        if self._unsupported or (sync := _sync_file_range()) is None:
            return
        while sync(self._descriptor, ctypes.c_int64(begin), ctypes.c_int64(count), ctypes.c_uint(flags)) != 0:
            found = ctypes.get_errno()
            if found in UNSUPPORTED:
                self._unsupported = True
                return
            if found != errno.EINTR:  # the kernel reports an error once: fsync() would not raise it again
                raise OSError(found, os.strerror(found))


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class ChecksumWriter(RawIOBase):
    """Write a file from its beginning to its end, and compute its checksum.

    Args:
        file: open for writing; closed with this object. A file in memory or in an object store is not flushed.
        on_write: is called with the number of bytes after each write.
    """

    def __init__(self, file: BinaryIO, on_write: OnWrite = lambda count: None) -> None:
        self._file, self._on_write = file, on_write
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._failed: OSError | None = None
        self._writeback: WritebackQueue | None = None
        with suppress(UnsupportedOperation, AttributeError):
            self._writeback = WritebackQueue(file.fileno())

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for block in _blocks(view):
            self._hash.update(block)
            try:
                write_all(self._file, block)
            except OSError as error:
                self._failed = error
                raise
            self._bytes += len(block)
            if self._writeback is not None:
                self._writeback.add(len(block))
            self._on_write(len(block))
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    @property
    def checksum(self) -> FileChecksum:
        return FileChecksum(self._bytes, self._hash.hexdigest())

    def __enter__(self) -> ChecksumWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                if self._writeback is not None:
                    self._writeback.drain(lambda: self._on_write(0))
        finally:
            self._file.close()
        if self._failed is not None and error not in (None, self._failed):
            raise self._failed from error  # torch.save replaces it by one about an unexpected position


def stable_memory(value: Any) -> dict[int, int]:
    """Return addresses and bytes of the host storages that live as long as ``value`` does."""
    return host_storages(tensors_in(value, attributes=False))


class ThreadedWriter(RawIOBase):
    """Write a file from its beginning to its end in a thread.

    Args:
        file: open for writing, without a buffer; closed with this object.
        stable: memory that does not change until this object is closed, see :func:`stable_memory`. Other memory is
            copied, or written before :meth:`write` returns.
        on_write: is called, from the thread, with the number of bytes after each write.
    """

    def __init__(self, file: BinaryIO, stable: Mapping[int, int], on_write: OnWrite = lambda count: None) -> None:
        self._file, self._stable, self._on_write = file, stable, on_write
        self._writeback = WritebackQueue(file.fileno())
        self._bytes = 0
        self._failed: BaseException | None = None
        self._queue: queue.Queue[memoryview | bytes | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._run, name="lightning_zero-checkpoint", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        if self._failed is not None:
            raise self._failed
        view = memoryview(data).cast("B")
        small = len(view) <= COPY_BYTES
        stable = small or self._is_stable(view)
        self._queue.put(bytes(view) if small else view)
        if not stable:
            self._queue.join()
        self._bytes += len(view)
        return len(view)

    def _is_stable(self, view: memoryview) -> bool:
        address = numpy.frombuffer(view, numpy.uint8).ctypes.data
        return len(view) <= self._stable.get(address, 0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                if self._failed is None:
                    self._put(memoryview(data))
            except BaseException as error:  # the next write() raises it
                self._failed = error
            finally:
                del data
                self._queue.task_done()

    def _put(self, view: memoryview) -> None:
        for block in _blocks(view):
            if self._failed is not None:
                return
            write_all(self._file, block)
            self._writeback.add(len(block))
            self._on_write(len(block))

    def __enter__(self) -> ThreadedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._failed is None:
            self._failed = error  # nothing more is written
        self._queue.put(None)
        self._thread.join()
        try:
            if self._failed is None:
                self._writeback.drain(lambda: self._on_write(0))
        finally:
            self._file.close()
        if self._failed is not None and self._failed is not error:  # torch.save raises one about a position instead
            raise self._failed from error
