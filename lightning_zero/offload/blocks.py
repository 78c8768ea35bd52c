"""Blocks of the host's memory that are used again from step to step: pinning takes long, and a thread that captures a
CUDA graph may not do it.

A block is lent as a tensor, and is free again when nobody holds that, or a view of it, any more. What graphs of the
device write to and read from must stay theirs between replays, when no tensor of a step is there: for that there are
:class:`ReservedBlocks` blocks.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.offload.memory import HostMemory

__all__ = ["ReservedBlocks", "HostBlocks"]

UNIT = 4096  # bytes that a block is a multiple of
SLACK = 8  # a block serves for what is at most an eighth smaller
SPARE = 4  # what is free, and not the right size, may be a fourth of the most that was lent at once


@dataclass(eq=False)
class _Block:
    memory: Tensor  # bytes
    lent: int = 0  # when it was lent last, by number


class ReservedBlocks:
    """What one graph after the other writes to, of which no two are under way at once.

    Attributes:
        blocks: lent to it for as long as it lives.
        used: of these, by the graph that is made now.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.used: set[int] = set()

    def take(self, nbytes: int) -> Tensor | None:
        """One that this graph has no use for yet."""
        fit = [n for n, b in enumerate(self.blocks) if n not in self.used and _fits(nbytes, b.numel())]
        if not fit:
            return None
        best = min(fit, key=lambda number: self.blocks[number].numel())
        self.used.add(best)
        return self.blocks[best]


class HostBlocks:
    """For one device.

    Attributes:
        nbytes: lent and free.
    """

    def __init__(self, device: torch.device, memory: HostMemory | None = None) -> None:
        self._device = device
        self._memory = memory or HostMemory(device)
        self._free: list[_Block] = []
        self._back: deque[_Block] = deque()  # from wherever a tensor is let go of, the garbage collector among it
        self._held: ReservedBlocks | None = None
        self._lock = threading.Lock()
        self._lendings = self._lent = self._most = 0
        self.nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """So many bytes, 1-D, not filled with anything in particular.

        Raises:
            HostMemoryError: the host has not so much.
        """
        if self._held is None:
            return self._lend(nbytes)[:nbytes]
        block = self._held.take(nbytes)
        if block is None:
            block = self._lend(nbytes)
            self._held.used.add(len(self._held.blocks))
            self._held.blocks.append(block)
        return block[:nbytes]

    @contextmanager
    def holding(self, held: ReservedBlocks) -> Iterator[None]:
        """What is taken inside, by whichever thread, is ``held``'s."""
        held.used.clear()
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    def give_back(self) -> None:
        """What is free is the host's again."""
        with self._lock:
            self._sort_in()
            self._drop(len(self._free))

    def _lend(self, nbytes: int) -> Tensor:
        with self._lock:
            self._lendings += 1
            self._sort_in()
            fit = [block for block in self._free if _fits(nbytes, block.memory.numel())]
            block = min(fit, key=lambda block: block.memory.numel(), default=None)
            if block is not None:
                self._free.remove(block)
            else:
                block = self._new(max(-(-nbytes // UNIT), 1) * UNIT)
            block.lent = self._lendings
            self._lent += block.memory.numel()
            self._most = max(self._most, self._lent)
        # A tensor over memory that is told when nobody has it any more.
        numel = block.memory.numel()
        buffer = (ctypes.c_char * numel).from_address(block.memory.data_ptr())
        weakref.finalize(buffer, self._back.append, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8, count=numel)

    def _sort_in(self) -> None:
        while self._back:
            block = self._back.popleft()
            self._lent -= block.memory.numel()
            self._free.append(block)

    def _new(self, nbytes: int) -> _Block:
        if self._capturing():
            # Of this thread nothing may be asked now that is not for the graph; of others it may.
            with ThreadPoolExecutor(1, "pinning") as thread:
                memory = thread.submit(self._memory.empty, nbytes, torch.uint8).result()
        else:
            self._make_room(nbytes)
            try:
                memory = self._memory.empty(nbytes, torch.uint8)
            except HostMemoryError:
                self._drop(len(self._free))
                memory = self._memory.empty(nbytes, torch.uint8)
        self.nbytes += memory.numel()
        return _Block(memory)

    def _make_room(self, nbytes: int) -> None:
        """Gives back sizes that do not come any more, as where batches are of many lengths."""
        most = max(self._most, self._lent + nbytes)
        while self._free and self.nbytes + nbytes > most + most // SPARE:
            self._drop(1)

    def _drop(self, count: int) -> None:
        """Gives back those that were not lent for longest."""
        self._free.sort(key=lambda block: block.lent)
        self.nbytes -= sum(block.memory.numel() for block in self._free[:count])
        del self._free[:count]

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fits(nbytes: int, block: int) -> bool:
    return nbytes <= block <= nbytes + max(nbytes // SLACK, UNIT)
