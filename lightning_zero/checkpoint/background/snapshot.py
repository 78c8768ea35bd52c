"""A copy of what a rank is about to save, in memory that its writer process maps, too, and that is used again.

On a GPU the copies go on a stream of their own, beside the next forward and backward; whoever writes shards next waits
for them on the device (:meth:`Snapshot.before_writing`), and the host does not. What is offloaded lies on the host, and
is copied by threads, for which the host waits there; they wait for the device, from which its last values may be coming
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_zero.checkpoint.background.runs import Run, dense_copy, layout_runs
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.writing import Blob, Piece
from lightning_zero.sharding.host_memory import copy_waiter
from lightning_zero.sharding.shared_memory import Claim, mapped

__all__ = ["Kept", "Memory", "Snapshot"]

COPY_BYTES = 256 << 20  # others want to copy, too
COPIERS = 4  # threads


@dataclass(frozen=True)
class Memory:
    """Where another process finds it.

    Attributes:
        path: to be opened.
        identity: by which it knows the right one.
        bytes: its size.
    """

    path: str
    identity: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class Kept:
    """A piece of a tensor, in the snapshot's memory, see :class:`~lightning_zero.checkpoint.sharded.writing.Piece`."""

    keys: tuple[str, ...]
    shape: torch.Size
    box: Box
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int

    def piece(self, memory: Tensor) -> Piece:
        """Of the 1-D uint8 ``memory``: a view."""
        count = self.box.numel * self.dtype.itemsize
        values = memory[self.offset : self.offset + count].view(self.dtype).as_strided(self.box.sizes, self.strides)
        return Piece(self.keys, self.shape, self.box, values)


def _copy(after: Callable[[], object], target: Tensor, part: Tensor) -> Tensor:
    after()
    return target.copy_(part)


def _kept(piece: Piece, values: Tensor, offset: int) -> Kept:
    return Kept(piece.keys, piece.shape, piece.box, values.dtype, values.stride(), offset)


class Snapshot:
    """One rank's.

    Args:
        device: on which the values live.
        beside: whether those on the host are copied beside what comes next, too; None: where the device is another.
    """

    def __init__(self, device: torch.device, beside: bool | None = None) -> None:
        self._device = device
        self._beside = device.type != "cpu" if beside is None else beside
        self._threads: ThreadPoolExecutor | None = None
        self._copying: list[Future[Tensor]] = []  # by them
        self._claim: Claim | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._held: list[Tensor] = []  # until they are copied: their memory must not serve something else

    @property
    def memory(self) -> Memory:
        """Of the last snapshot."""
        assert self._claim is not None, "no snapshot was taken"
        return Memory(self._claim.path, self._claim.identity, self._memory.numel())

    def take(self, items: Iterable[Piece | Blob]) -> list[Kept | Blob]:
        """Starts the copies of all pieces. Their values may change after :meth:`before_writing`.

        Raises:
            OSError: the host has not so much memory.
        """
        self.wait()
        items = list(items)
        pieces = [item for item in items if isinstance(item, Piece)]
        values = [dense_copy(piece.values) for piece in pieces]
        runs, offsets, end = layout_runs(values, [piece.guarded for piece in pieces])
        self.reserve(end)
        if self._beside:
            runs = [run if run.guarded else replace(run, memory=run.memory.clone()) for run in runs]
        there, here = [], runs  # without a stream what lies elsewhere is copied like what lies here
        if self._stream is not None:
            there = [run for run in runs if run.memory.device.type != "cpu"]
            here = [run for run in runs if run.memory.device.type == "cpu"]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for target, part in self._copies(there):
                    target.copy_(part, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
            self._held = [run.memory for run in there]
        given = copy_waiter(self._device)
        for target, part in self._copies(here):
            if self._beside:
                self._threads = self._threads or ThreadPoolExecutor(COPIERS, "lightning_zero-snapshot")
                self._copying.append(self._threads.submit(_copy, given, target, part))
            else:
                target.copy_(part)
        placed = zip(values, offsets, strict=True)
        return [_kept(item, *next(placed)) if isinstance(item, Piece) else item for item in items]

    def _copies(self, runs: Iterable[Run]) -> Iterator[tuple[Tensor, Tensor]]:
        """Where to, and what."""
        for run in runs:
            for begin in range(0, run.memory.numel(), COPY_BYTES):
                part = run.memory[begin : begin + COPY_BYTES]
                yield self._memory[run.offset + begin :][: part.numel()], part

    def before_writing(self) -> None:
        """What comes next, on this thread and on the current stream, comes after the copies. Harmless when repeated."""
        wait(self._copying)
        copied = self._copied  # another thread waits, too, and forgets it
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def wait(self) -> None:
        """Until all copies are in the memory; the host waits.

        Raises:
            RuntimeError: one was not made.
        """
        try:
            if self._copied is not None:
                self._copied.synchronize()
            wait(self._copying)
            for copy in self._copying:
                copy.result()
        finally:
            self._copied, self._copying, self._held = None, [], []

    def close(self) -> None:
        """Gives the memory back."""
        self.wait()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._release()

    def reserve(self, count: int) -> None:
        """Has so many bytes ready, which takes seconds for many: pages are cleared, and bound where they are.

        Raises:
            OSError: the host has not so much memory.
        """
        if self._claim is not None and self._memory.numel() >= count:
            return
        self._release()
        self._claim = Claim.of(count)
        self._memory = mapped(self._claim.path, self._claim.identity, max(count, 1), torch.uint8)
        if self._stream is not None:
            # Copies into memory that may be swapped out go through a small buffer, and the host waits for them.
            with torch.cuda.device(self._device):  # a new thread would begin to use the first one
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
                )

    def _release(self) -> None:
        if self._claim is None:
            return
        if self._stream is not None:
            with torch.cuda.device(self._device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._claim.release()
        self._claim = None
