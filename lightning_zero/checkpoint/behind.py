"""A file that a thread writes, while whoever gives it bytes makes the next ones: ``torch.save`` sums up each storage
before it hands it over, which takes about as long as writing it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from io import RawIOBase
from types import TracebackType
from typing import Any, BinaryIO

import numpy
from torch import Tensor

from lightning_zero.checkpoint.disk import Disk, in_blocks, write_all
from lightning_zero.sharding.layout import is_strided

__all__ = ["ThreadedWriter", "lasting"]

SMALL = 1 << 16  # bytes that are copied
WAITING = 1024  # pieces that are not written yet


def lasting(value: Any) -> dict[int, int]:
    """Where values lie in the host's memory that stay there as long as ``value`` does: addresses of storages, and their
    bytes."""
    found: dict[int, int] = {}
    _collect(value, found)
    return found


def _collect(value: Any, found: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and is_strided(value) and type(value).untyped_storage is Tensor.untyped_storage:
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, Mapping):
        for inner in value.values():
            _collect(inner, found)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, found)


class ThreadedWriter(RawIOBase):
    """Written from its beginning to its end. When it is closed without an error, its bytes are on the disk, and not
    only in the system's memory.

    Args:
        file: open for writing, without a buffer; closed with this object.
        lasting: memory that stays as it is until this object is closed, see :func:`lasting`. Other memory is copied,
            or written before :meth:`write` returns.
        wrote: is told, from the thread, how many bytes more are written.
    """

    def __init__(
        self, file: BinaryIO, lasting: Mapping[int, int], wrote: Callable[[int], None] = lambda count: None
    ) -> None:
        self._file, self._lasting, self._wrote = file, lasting, wrote
        self._disk = Disk(file.fileno())
        self._given = 0
        self._failed: BaseException | None = None
        self._pieces: queue.Queue[memoryview | bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="lightning_zero-checkpoint", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        """All of ``data``, which has the buffer protocol."""
        if self._failed is not None:
            raise self._failed
        view = memoryview(data).cast("B")
        stays = len(view) <= SMALL or self._stays(view)
        self._pieces.put(bytes(view) if len(view) <= SMALL else view)
        if not stays:
            self._pieces.join()
        self._given += len(view)
        return len(view)

    def _stays(self, view: memoryview) -> bool:
        address = numpy.frombuffer(view, numpy.uint8).ctypes.data
        return len(view) <= self._lasting.get(address, 0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                if self._failed is None:
                    self._put(memoryview(piece))
            except BaseException as error:  # whoever gives the next piece raises it
                self._failed = error
            finally:
                del piece
                self._pieces.task_done()

    def _put(self, view: memoryview) -> None:
        for block in in_blocks(view):
            if self._failed is not None:
                return
            write_all(self._file, block)
            self._disk.follow(len(block))
            self._wrote(len(block))

    def __enter__(self) -> ThreadedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._failed is None:
            self._failed = error  # nothing more is written
        self._pieces.put(None)
        self._thread.join()
        try:
            if self._failed is None:
                self._disk.settle(lambda: self._wrote(0))
        finally:
            self._file.close()
        if self._failed is not None and self._failed is not error:  # torch tells of it as a position not expected
            raise self._failed from error
