"""Keep activations in host memory between forward and backward.

Compiled graphs contain four ops (``compile/passes/activation_offload.py``): ``start_offload`` starts a copy to the host
and ``wait_offload`` lets compute wait for it, after which the device's memory is free. In backward, ``start_load`` and
``wait_load`` do the reverse. A graph holds both tensors until compute has waited, so no event outlives a graph, and
CUDA graphs can capture the ops.

Host memory comes from :class:`HostBlocks`, because pinning is slow and impossible while capturing a CUDA graph. torch's
own ``_functorch/_activation_offloading`` pins without reuse by default, and cannot be captured in CUDA graphs.
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

PendingCopy = tuple[Event, Tensor, Tensor]  # event, device tensor, host tensor: alive until compute has waited


class HostActivations:
    """Copy activations of one engine to the host and back. ``quota`` counts offloaded bytes."""

    def __init__(
        self, device: torch.device, blocks: HostBlocks | None = None, streams: CopyStreams | None = None
    ) -> None:
        self._device = device
        self._streams = streams
        self.quota = OffloadQuota()
        self.blocks = blocks or HostBlocks(device)
        # By address of the copy's target.
        self._offloading: dict[int, PendingCopy] = {}
        self._loading: dict[int, PendingCopy] = {}

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    @property
    def streams(self) -> CopyStreams:
        if self._streams is None:
            self._streams = copy_streams_of(self._device)
        return self._streams

    def start_offload(self, value: Tensor) -> Tensor:
        """Start a copy to the host after the compute so far, and return the host tensor.

        It has the same sizes, strides and dtype.
        """
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
        """Start a copy to the device after the compute so far; return the device tensor."""
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
        """Let compute wait for copies that an exception has interrupted, and drop them."""
        for under_way in (self._offloading, self._loading):
            while under_way:
                event, _, _ = under_way.popitem()[1]
                self.streams.wait(event)

    def reset(self) -> None:
        """Drop interrupted copies, and free unused host memory."""
        self.wait_all()
        self.blocks.free_unused()

    @contextmanager
    def reserving(self, held: ReservedBlocks) -> Iterator[None]:
        """Inside, a captured forward uses these blocks; see :class:`ReservedBlocks`."""
        with self.blocks.reserving(held):
            yield

    @contextmanager
    def uncounted(self, sent: list[int]) -> Iterator[None]:
        """Inside, append offloaded bytes to ``sent`` instead of counting them.

        A forward that is captured does not run.
        """
        before = replace(self.quota)
        yield
        sent.append(self.quota.sent - before.sent)
        self.quota.sent, self.quota.exceeded_by = before.sent, before.exceeded_by


_WRONG_TENSOR = (
    "lightning_zero: a graph waits for the copy of an activation with another tensor than it was started with: the "
    "compiler has inserted a copy. Please report this. Until then, leave 'activations' out of offload=."
)


def _pop(under_way: dict[int, PendingCopy], tensor: Tensor) -> PendingCopy:
    found = under_way.pop(tensor.data_ptr(), None)
    if found is None:
        raise RuntimeError(_WRONG_TENSOR)
    return found


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view of all memory from the first to the last element."""
    return tensor.as_strided((extent(tensor.size(), tensor.stride()),), (1,))


@dataclass
class OffloadQuota:
    """Bound the bytes that one forward offloads, if a total is given.

    Graphs are compiled one by one, when they are first called, so the number of later ones is unknown. Therefore a
    graph may offload its call's share of the rest of the quota. Modules that look alike share a graph, so the first
    step counts calls of compiled modules. A pass stays within the quota if no graph runs twice in a call or in modules
    that differ, no call is new, and batches are no larger than the compiled ones.

    Attributes:
        calls_per_pass: calls of compiled modules in a forward.
        sent: bytes offloaded in this forward.
        exceeded_by: name of the module whose call exceeded the quota, or empty.
    """

    calls_per_pass: int = 1
    sent: int = 0
    exceeded_by: str = ""
    _limit: float = math.inf
    _call: int = 0  # number of the current call
    _sent_before_call: int = 0
    _call_name: str = "a module"

    def begin_pass(self, most: float = math.inf) -> None:
        """Begin a forward that may offload ``most`` bytes."""
        self.sent = self._call = self._sent_before_call = 0
        self.exceeded_by, self._limit = "", most

    def begin_call(self, called: str) -> None:
        """Begin a call of a compiled module."""
        self._call += 1
        self._sent_before_call, self._call_name = self.sent, called

    def record(self, nbytes: int) -> None:
        """Count offloaded bytes."""
        self.sent += nbytes
        if self.sent > self._limit and not self.exceeded_by:
            self.exceeded_by = self._call_name

    def remaining(self, most: float) -> float:
        """Return the bytes that a graph compiled now may offload, of ``most`` in the whole forward."""
        part = (most - self._sent_before_call) / max(self.calls_per_pass - self._call + 1, 1)
        return max(part - (self.sent - self._sent_before_call), 0.0)


BLOCK_UNIT_BYTES = 4096  # a block is a multiple of a page
MAX_WASTE_DIVISOR = 8  # a block may be an eighth larger than requested
SPARE_DIVISOR = 4  # spare blocks of other sizes: at most a fourth of the peak


@dataclass(eq=False)
class _Block:
    memory: Tensor  # uint8
    last_use: int = 0  # sequence number of its last loan


class ReservedBlocks:
    """Hold the blocks of CUDA graphs that never run concurrently.

    Captured graphs write to and read from fixed addresses, which must stay reserved between replays. ``used`` are
    indices of the blocks that the graph being captured uses.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.used: set[int] = set()

    def allocate(self, nbytes: int) -> Tensor | None:
        """Return a block that this graph does not use yet, or None."""
        fit = [n for n, b in enumerate(self.blocks) if n not in self.used and _fits(nbytes, b.numel())]
        if not fit:
            return None
        best = min(fit, key=lambda number: self.blocks[number].numel())
        self.used.add(best)
        return self.blocks[best]


class HostBlocks:
    """Reuse blocks of pinned host memory from step to step, for one device.

    A block is lent as a tensor, and is free again when that tensor and all its views are deleted.
    """

    def __init__(self, device: torch.device, memory: HostMemory | None = None) -> None:
        self._device = device
        self._memory = memory or HostMemory(device)
        self._free: list[_Block] = []
        self._returned: deque[_Block] = deque()  # filled by finalizers, from any thread
        self._reserved: ReservedBlocks | None = None
        self._lock = threading.Lock()
        self._uses = self._lent_bytes = self._max_lent_bytes = 0
        self.nbytes = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` of uninitialized memory, 1-D; raise HostMemoryError if there is too little."""
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
        """Inside, allocations of any thread are taken from ``reserved``."""
        reserved.used.clear()
        before, self._reserved = self._reserved, reserved
        try:
            yield
        finally:
            self._reserved = before

    def free_unused(self) -> None:
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
        # A finalizer on the buffer runs when the last tensor on it is deleted.
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
            # This thread may not call the driver while it captures; others may.
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
        """Free blocks of sizes that are not used any more, for example if sequence lengths vary."""
        most = max(self._max_lent_bytes, self._lent_bytes + nbytes)
        while self._free and self.nbytes + nbytes > most + most // SPARE_DIVISOR:
            self._drop(1)

    def _drop(self, count: int) -> None:
        """Free the least recently lent blocks."""
        self._free.sort(key=lambda block: block.last_use)
        self.nbytes -= sum(block.memory.numel() for block in self._free[:count])
        del self._free[:count]

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fits(nbytes: int, block: int) -> bool:
    return nbytes <= block <= nbytes + max(nbytes // MAX_WASTE_DIVISOR, BLOCK_UNIT_BYTES)
