"""Activations that lie in the host's memory between forward and backward.

Compiled graphs call four steps, by ops that ``compile/passes/offload.py`` puts into them:

    ``start_offload``   a copy to the host starts, behind whatever compute was given before
    ``wait_offload``    compute waits for it: from here on the device's memory may be used for something else
    ``start_load``    in backward, a copy back starts, likewise behind what compute was given
    ``wait_load``    compute waits for it: it may be read, and the host's memory used for something else

Every copy is waited for by compute, on the side where it was started, before either of its ends can be let go of: a
graph holds both tensors up to that step. So all other orders follow, without an event that outlives a graph, and a CUDA
graph may hold all of it: a copy in comes behind the copy out of the same value, and a copy into memory of the host
behind the copies that had it before, since each begins behind compute, which waited for those.

Memory of the host is pinned once and used from step to step, see ``blocks.py``. Where no backward comes, it is free
when nobody holds the graph of the forward any more, as all that is saved for backward is.


---

How much of what is saved for backward a pass sends to the host, where an quota is named for all of it.

Graphs are compiled one by one, each when it is first called, and nobody knows then how many will follow. So a graph may
send what is left of the quota in the pass that is under way: of that the current call's part, since modules that look
alike run one graph, and later calls are to have as much. How many calls of compiled modules a pass has, the first step
has shown. So no pass sends more than the quota, and nothing is compiled twice for it, as long as no graph runs more
than once in a call, or in modules that do not look alike, no call comes that the first step did not have, and batches
are as large as those compiled for.


---

Blocks of the host's memory that are used again from step to step: pinning takes long, and a thread that captures a
CUDA graph may not do it.

A block is lent as a tensor, and is free again when nobody holds that, or a view of it, any more. What graphs of the
device write to and read from must stay theirs between replays, when no tensor of a step is there: for that there are
:class:`ReservedBlocks` blocks.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import CopyStreams, Event, copy_streams_of
from lightning_zero.sharding.layout import extent

__all__ = ["HostActivations", "HostBlocks", "OffloadQuota", "ReservedBlocks"]

PendingCopy = tuple[Event, Tensor, Tensor]  # a copy, and both of its ends, which live until it is waited for


class HostActivations:
    """Of one engine.

    Args:
        device: where compute is.
        blocks: of the host's memory.
        streams: for copies; by default the device's, made with the first copy.

    Attributes:
        quota: counts what leaves.
    """

    def __init__(
        self, device: torch.device, blocks: HostBlocks | None = None, streams: CopyStreams | None = None
    ) -> None:
        self._device = device
        self._streams = streams
        self.quota = OffloadQuota()
        self.blocks = blocks or HostBlocks(device)
        # By where the end lies that a graph lets go of first: on the device, on the host.
        self._offloading: dict[int, PendingCopy] = {}
        self._loading: dict[int, PendingCopy] = {}

    @property
    def nbytes(self) -> int:
        """Of memory of the host, in use or free for the next step."""
        return self.blocks.nbytes

    @property
    def streams(self) -> CopyStreams:
        if self._streams is None:
            self._streams = copy_streams_of(self._device)
        return self._streams

    def start_offload(self, value: Tensor) -> Tensor:
        """Of the same sizes, strides and dtype."""
        flat = _flat(value)
        taken = self.blocks.allocate(flat.nbytes).view(value.dtype)
        host = taken.as_strided(value.size(), value.stride())
        if flat.numel():
            event = self.streams.copy_out([(taken, flat)], [self.streams.compute_event()])
            self.quota.record(flat.nbytes)
            self._offloading[host.data_ptr()] = event, value, host
        return host

    def wait_offload(self, value: Tensor, host: Tensor) -> None:
        if value.numel():
            event, mine, _ = _pop(self._offloading, host)
            self.streams.wait(event)
            if mine.data_ptr() != value.data_ptr():
                raise RuntimeError(_WRONG_TENSOR)

    def start_load(self, host: Tensor) -> Tensor:
        value = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        if value.numel():
            event = self.streams.copy_in([(_flat(value), _flat(host))], [self.streams.compute_event()])
            self._loading[value.data_ptr()] = event, value, host
        return value

    def wait_load(self, value: Tensor, host: Tensor) -> None:
        if value.numel():
            event, _, mine = _pop(self._loading, value)
            self.streams.wait(event)
            if mine.data_ptr() != host.data_ptr():
                raise RuntimeError(_WRONG_TENSOR)

    def wait_all(self) -> None:
        """What an exception has left half done: compute waits for it, and then it is let go of. Nothing happens
        otherwise."""
        for under_way in (self._offloading, self._loading):
            while under_way:
                event, _, _ = under_way.popitem()[1]
                self.streams.wait(event)

    def reset(self) -> None:
        """The same, and memory that nobody uses is the host's again."""
        self.wait_all()
        self.blocks.free_unused()

    @contextmanager
    def reserving(self, held: ReservedBlocks) -> Iterator[None]:
        """Surrounds a forward that is captured: see :class:`ReservedBlocks`."""
        with self.blocks.reserving(held):
            yield

    @contextmanager
    def uncounted(self, sent: list[int]) -> Iterator[None]:
        """Surrounds one that does not run: what leaves is not counted, but noted, for each replay to count."""
        before = replace(self.quota)
        yield
        sent.append(self.quota.sent - before.sent)
        self.quota.sent, self.quota.exceeded_by = before.sent, before.exceeded_by


_WRONG_TENSOR = (
    "lightning_zero: a graph waits for the copy of an activation with another tensor than it was started with: the "
    "compiler has made a copy in between. Please report this. Until then, leave 'activations' out of offload=."
)


def _pop(under_way: dict[int, PendingCopy], tensor: Tensor) -> PendingCopy:
    found = under_way.pop(tensor.data_ptr(), None)
    if found is None:
        raise RuntimeError(_WRONG_TENSOR)
    return found


def _flat(tensor: Tensor) -> Tensor:
    """All memory from its first to its last element, which is itself where there are no gaps."""
    return tensor.as_strided((extent(tensor.size(), tensor.stride()),), (1,))


@dataclass
class OffloadQuota:
    """Of one engine.

    Attributes:
        calls: of compiled modules in a pass.
        sent: bytes that have left in this one.
        beyond: who was called, in words, when more had left than was named; empty where that is not so.
    """

    calls_per_pass: int = 1
    sent: int = 0
    exceeded_by: str = ""
    _limit: float = math.inf
    _call: int = 0  # of the current call
    _sent_before_call: int = 0  # sent when it began
    _call_name: str = "a module"

    def begin_pass(self, most: float = math.inf) -> None:
        """``most``: bytes that are to leave in it."""
        self.sent = self._call = self._sent_before_call = 0
        self.exceeded_by, self._limit = "", most

    def begin_call(self, called: str) -> None:
        """Of a compiled module."""
        self._call += 1
        self._sent_before_call, self._call_name = self.sent, called

    def record(self, nbytes: int) -> None:
        """So much leaves."""
        self.sent += nbytes
        if self.sent > self._limit and not self.exceeded_by:
            self.exceeded_by = self._call_name

    def remaining(self, most: float) -> float:
        """Bytes that may leave from a graph that is compiled now, of ``most`` in all of the pass."""
        part = (most - self._sent_before_call) / max(self.calls_per_pass - self._call + 1, 1)
        return max(part - (self.sent - self._sent_before_call), 0.0)


BLOCK_UNIT_BYTES = 4096  # bytes that a block is a multiple of
MAX_WASTE_DIVISOR = 8  # a block serves for what is at most an eighth smaller
SPARE_DIVISOR = 4  # what is free, and not the right size, may be a fourth of the most that was lent at once


@dataclass(eq=False)
class _Block:
    memory: Tensor  # bytes
    last_use: int = 0  # when it was lent last, by number


class ReservedBlocks:
    """What one graph after the other writes to, of which no two are under way at once.

    Attributes:
        blocks: lent to it for as long as it lives.
        used: of these, by the graph that is made now.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.used: set[int] = set()

    def allocate(self, nbytes: int) -> Tensor | None:
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
        self._returned: deque[_Block] = deque()  # from wherever a tensor is let go of, the garbage collector among it
        self._reserved: ReservedBlocks | None = None
        self._lock = threading.Lock()
        self._uses = self._lent_bytes = self._max_lent_bytes = 0
        self.nbytes = 0

    def allocate(self, nbytes: int) -> Tensor:
        """So many bytes, 1-D, not filled with anything in particular.

        Raises:
            HostMemoryError: the host has not so much.
        """
        if self._reserved is None:
            return self._lend(nbytes)[:nbytes]
        block = self._reserved.allocate(nbytes)
        if block is None:
            block = self._lend(nbytes)
            self._reserved.used.add(len(self._reserved.blocks))
            self._reserved.blocks.append(block)
        return block[:nbytes]

    @contextmanager
    def reserving(self, reserved: ReservedBlocks) -> Iterator[None]:
        """What is taken inside, by whichever thread, is ``reserved``'s."""
        reserved.used.clear()
        before, self._reserved = self._reserved, reserved
        try:
            yield
        finally:
            self._reserved = before

    def free_unused(self) -> None:
        """What is free is the host's again."""
        with self._lock:
            self._collect_returned()
            self._drop(len(self._free))

    def _lend(self, nbytes: int) -> Tensor:
        with self._lock:
            self._uses += 1
            self._collect_returned()
            fit = [block for block in self._free if _fits(nbytes, block.memory.numel())]
            block = min(fit, key=lambda block: block.memory.numel(), default=None)
            if block is not None:
                self._free.remove(block)
            else:
                block = self._new(max(-(-nbytes // BLOCK_UNIT_BYTES), 1) * BLOCK_UNIT_BYTES)
            block.last_use = self._uses
            self._lent_bytes += block.memory.numel()
            self._max_lent_bytes = max(self._max_lent_bytes, self._lent_bytes)
        # A tensor over memory that is told when nobody has it any more.
        numel = block.memory.numel()
        buffer = (ctypes.c_char * numel).from_address(block.memory.data_ptr())
        weakref.finalize(buffer, self._returned.append, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8, count=numel)

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._lent_bytes -= block.memory.numel()
            self._free.append(block)

    def _new(self, nbytes: int) -> _Block:
        if self._capturing():
            # Of this thread nothing may be asked now that is not for the graph; of others it may.
            with ThreadPoolExecutor(1, "pinning") as thread:
                memory = thread.submit(self._memory.empty, nbytes, torch.uint8).result()
        else:
            self._drop_spare(nbytes)
            try:
                memory = self._memory.empty(nbytes, torch.uint8)
            except HostMemoryError:
                self._drop(len(self._free))
                memory = self._memory.empty(nbytes, torch.uint8)
        self.nbytes += memory.numel()
        return _Block(memory)

    def _drop_spare(self, nbytes: int) -> None:
        """Gives back sizes that do not come any more, as where batches are of many lengths."""
        most = max(self._max_lent_bytes, self._lent_bytes + nbytes)
        while self._free and self.nbytes + nbytes > most + most // SPARE_DIVISOR:
            self._drop(1)

    def _drop(self, count: int) -> None:
        """Gives back those that were not lent for longest."""
        self._free.sort(key=lambda block: block.last_use)
        self.nbytes -= sum(block.memory.numel() for block in self._free[:count])
        del self._free[:count]

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fits(nbytes: int, block: int) -> bool:
    return nbytes <= block <= nbytes + max(nbytes // MAX_WASTE_DIVISOR, BLOCK_UNIT_BYTES)
