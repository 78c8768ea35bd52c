"""The ways on which copies between host and device go beside what the device computes.

Three lanes work side by side, each in its own order: copies in, copies out, and compute, which is the device's current
stream. An event is all that a lane has been given up to a moment; a lane that waits for one does nothing further until
that is done. ``staging_ring.py`` decides which waits are needed. Tests replace the lanes by some that run in the worst
order.


---

Some buffers on the device, through which much more passes that lies on the host.

While one buffer is computed in, those of the loads before it are on their way back to the host, and those of the loads
behind it on their way in. A :class:`RingPass` has three parts:

    ``prefetch``               the first loads, as many as there are buffers, start to come: the earlier, the better
    ``open``, ``close``     by turns, for each load: what is in its buffer may be changed; then it leaves, and the load
                            that is next in the same buffer comes. May be captured in a CUDA graph, between ``join``
                            and ``rejoin``
    ``flush``               the last loads, which nobody waits for

Three waits keep copies and compute apart, beside compute's own for what it is about to use:

    a copy in waits for compute         whatever compute was given before the pass comes first
    a copy in waits for a copy out      of the load that had the buffer before, and of the last time that this load
                                        left; behind a pass of other loads, for all copies out
    a copy out waits for compute        which writes what is to be copied

Copies of one direction keep their order, so that a wait for the last one is a wait for all. Loads that come ahead do so
in the order in which their buffers get free: copies go both ways at once, however many buffers there are.


---

How fast copies between a device and pinned memory of its host are, while both directions and all ranks copy: hosts
share it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.extrema import all_min
from lightning_zero.mesh import Mesh
from lightning_zero.offload.pinned_memory import HostMemory

__all__ = [
    "Copy",
    "CopyStreams",
    "CpuCopyStreams",
    "CudaCopyStreams",
    "FRACTION_WITH_COMPUTE",
    "RingPass",
    "StagedChunk",
    "StagedChunks",
    "StagingRing",
    "copy_streams_of",
    "measure_host_bandwidth",
]

Copy = tuple[Tensor, Tensor]  # to, from
Event = Any


class CopyStreams(Protocol):
    """Takes copies. Nothing here waits on the host."""

    def record_use(self, memory: Tensor) -> None:
        """Copies will go there, and from there: once it is given back, whoever gets it next waits for them."""
        ...

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        """From the host, once all of ``after`` is done."""
        ...

    def copy_out(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        """To the host, likewise."""
        ...

    def compute_event(self) -> Event:
        """All that compute has been given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Compute goes on behind it."""
        ...


class CudaCopyStreams:
    """Of a GPU: copies on two streams, one for each direction, which its copy engines serve at once. May be captured
    in a CUDA graph, if all that is waited for inside was given to the lanes inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_in_stream, self._copy_out_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def record_use(self, memory: Tensor) -> None:
        for stream in (self._copy_in_stream, self._copy_out_stream):
            memory.record_stream(stream)

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return _copy_on(self._copy_in_stream, copies, after)

    def copy_out(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return _copy_on(self._copy_out_stream, copies, after)

    def compute_event(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


def _copy_on(stream: torch.cuda.Stream, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
    for event in after:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)
    return stream.record_event()


class CpuCopyStreams:
    """Of a CPU: whatever is given is done at once, so nobody ever waits."""

    def record_use(self, memory: Tensor) -> None:
        pass

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        for to, source in copies:
            to.copy_(source)

    copy_out = copy_in

    def compute_event(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass


def copy_streams_of(device: torch.device) -> CopyStreams:
    return CudaCopyStreams(device) if device.type == "cuda" else CpuCopyStreams()


MIN_SLOTS = 4  # in use, going out, and two coming in
MAX_SLOT_BYTES = 64 << 20  # of a slot: a copy of that size is as fast per byte as any
ALIGNMENT = 512  # bytes, as torch's allocator aligns
MIN_TENSORS_PER_SLOT = 8  # tensors of which a slot has room for 32 elements

StagedChunk = Mapping[str, Tensor]  # contiguous memory of the host


class StagedChunks(list[StagedChunk]):
    """Those of passes that are made again and again."""


def _no_pass() -> None:
    """The loads of no pass."""


class StagingRing:
    """The buffers, and how big chunks may be.

    Args:
        device: where.
        nbytes: of all buffers together, at most. The memory is allocated with the first pass, for no more buffers than
            that has chunks.
        streams: for copies; by default the device's.
        stamp: is another one once chunks may have been written to otherwise than through their tensors.

    Attributes:
        slots: number of the buffers.
        slot_bytes: of each.
        most: chunks of the longest pass.
        last: all that was to leave so far; None before there was anything.
        leaving: the chunks of the pass that left last, if it is made again, and when those that it had in buffers have
            left, by number, in their order. Holds no chunk: state that an optimizer has dropped is to be gone.
        coming: events of the copies in that compute has not waited for, by chunk, of the pass that has the buffers. Not
            the pass: as a cycle the two would keep buffers, and state, until Python's garbage collector runs.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        streams: CopyStreams | None = None,
        stamp: Callable[[], Any] = lambda: None,
    ) -> None:
        self._device = device
        self.stamp = stamp
        self.streams = streams or copy_streams_of(device)
        self.last_copy_out: Event = None
        self.pending_copies: dict[int, Event] = {}
        self.longest_pass = self.slot_bytes = 0
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """Other buffers, of so many bytes, from the next pass on. Not while one is under way."""
        if self.pending_copies:  # what came ahead: nobody else may get that memory before it has
            self.streams.wait(next(reversed(self.pending_copies.values())))
            self.pending_copies.clear()
        if self.last_copy_out is not None:
            self.streams.wait(self.last_copy_out)
        before = self.slot_bytes
        self.slot_bytes = max(min(nbytes // MIN_SLOTS, MAX_SLOT_BYTES) // ALIGNMENT, MIN_TENSORS_PER_SLOT) * ALIGNMENT
        self.longest_pass = (
            self.longest_pass if self.slot_bytes == before else 0
        )  # the same state is cut into other chunks
        self.slots = self._max_slots = max(nbytes // self.slot_bytes, MIN_SLOTS)
        self.last_pass: tuple[Callable[[], Sequence[StagedChunk] | None], dict[int, Event]] = _no_pass, {}
        self.pending_copies = {}
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """On the device, now."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def can_grow(self) -> bool:
        """Whether :meth:`resize` would make more buffers, for a pass that is longer than the first one was."""
        return self.slots < min(self._max_slots, self.longest_pass)

    def elements(self, itemsizes: Sequence[int]) -> int:
        """How many elements of several tensors, of these sizes in bytes, one buffer holds: a multiple of 32, and at
        least that."""
        room = self.slot_bytes - len(itemsizes) * ALIGNMENT
        return max(room // max(sum(itemsizes), 1) // 32, 1) * 32

    def allocated(self) -> Tensor:
        """The memory of all buffers: bytes, allocated now if it was not before."""
        if self._memory is None:
            self.slots = max(min(self.slots, self.longest_pass), MIN_SLOTS)
            self._memory = torch.empty(self.slots * self.slot_bytes, dtype=torch.uint8, device=self._device)
            # A training may end, and all of it go, while state is on its way.
            self.streams.record_use(self._memory)
        return self._memory

    def buffers(self, number: int, like: StagedChunk) -> dict[str, Tensor]:
        """Where the chunk of this number of a pass lies on the device.

        Raises:
            ValueError: it is too large.
        """
        if not like:
            return {}
        memory, begin = self.allocated(), number % self.slots * self.slot_bytes
        found, end = {}, begin + self.slot_bytes
        for name, tensor in like.items():
            if begin + tensor.nbytes > end:
                raise ValueError(f"{name!r} of {tensor.nbytes} bytes does not fit into a slot of {self.slot_bytes}")
            found[name] = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return found


class RingPass:
    """Once through a ring.

    Args:
        ring: that no other pass is in.
        chunks: in their order. One without tensors has nothing to bring, and may have something to take.
    """

    def __init__(self, ring: StagingRing, chunks: Sequence[StagedChunk]) -> None:
        self._ring, self._streams, self._chunks = ring, ring.streams, chunks
        self._arrivals: dict[int, Event] = {}  # by chunk, until compute has waited for it
        self._replaced: dict[int, StagedChunk] = {}  # chunks in the place of those that came
        self._last_copy_out: Event = None
        self._prefetched_versions: list[Any] = []

    def prefetch(self) -> None:
        """The first chunks come, each once its buffer, and it itself, has left."""
        self._ring.pending_copies = self._arrivals
        self._ring.longest_pass = max(self._ring.longest_pass, len(self._chunks))
        if any(self._chunks):
            # With deterministic algorithms torch fills new memory, on compute: behind `now` that would meet copies.
            self._ring.allocated()
        now, slots = self._streams.compute_event(), self._ring.slots
        (of, left), self._ring.last_pass = self._ring.last_pass, (_no_pass, {})
        # Of the same chunks the last ones leave, one from each buffer, and none that comes has left later than that.
        coming, count = {number % slots: event for number, event in left.items()}, min(slots, len(self._chunks))
        if of() is not self._chunks or len(coming) != count:
            coming = dict.fromkeys(range(count), self._ring.last_copy_out)
        for number, event in coming.items():
            self._copy_chunk_in(number, [now] if event is None else [now, event])
        self._prefetched_versions = self._source_versions()

    @property
    def is_valid(self) -> bool:
        """Whether what has come ahead is still there, and what it was brought from has not been written to since."""
        return self._ring.pending_copies is self._arrivals and self._prefetched_versions == self._source_versions()

    def _source_versions(self) -> list[Any]:
        coming = self._chunks[: self._ring.slots]
        return [self._ring.stamp(), *(tensor._version for chunk in coming for tensor in chunk.values())]

    def join(self) -> None:
        """Compute waits for all that comes ahead. What follows on it may be captured up to :meth:`rejoin`."""
        if self._arrivals:
            self._streams.wait(next(reversed(self._arrivals.values())))
        self._arrivals.clear()

    def open(self, number: int) -> dict[str, Tensor]:
        """What compute, from here to :meth:`close`, finds of this chunk, and may change."""
        if number in self._arrivals:
            self._streams.wait(self._arrivals.pop(number))
        return self._ring.buffers(number, self._chunks[number])

    def close(self, number: int, chunk: StagedChunk | None = None, values: StagedChunk | None = None) -> None:
        """The chunk leaves, if its buffer is needed; otherwise :meth:`flush` sees to it.

        Args:
            number: that was opened.
            chunk: what goes in its place, if it is not what came.
            values: on the device, what of it may lie elsewhere than in the buffers.
        """
        chunk = self._replaced[number] = self._chunks[number] if chunk is None else chunk
        buffers = self._ring.buffers(number, chunk)
        for name, value in (values or {}).items():
            if value.data_ptr() != buffers[name].data_ptr():
                buffers[name].copy_(value.reshape(-1))
        if number + self._ring.slots < len(self._chunks):
            self._last_copy_out = self._copy_chunk_out(number, chunk)
            self._copy_chunk_in(number + self._ring.slots, [self._last_copy_out])

    def rejoin(self) -> None:
        """Compute waits for all that has left."""
        if self._last_copy_out is not None:
            self._streams.wait(self._last_copy_out)

    def flush(self, numbers: Iterable[int] | None = None) -> None:
        """What is still in its buffers leaves: of these chunks, or of those that were closed here."""
        left: dict[int, Event] = {}
        for number in sorted(self._replaced if numbers is None else numbers):
            if number + self._ring.slots >= len(self._chunks):
                self._last_copy_out = left[number] = self._copy_chunk_out(
                    number, self._replaced.get(number, self._chunks[number])
                )
        if self._last_copy_out is not None:
            self._ring.last_copy_out = self._last_copy_out
        self._ring.last_pass = (weakref.ref(self._chunks) if isinstance(self._chunks, StagedChunks) else _no_pass), left

    def _copy_chunk_in(self, number: int, after: Sequence[Event]) -> None:
        chunk = self._chunks[number]
        buffers = self._ring.buffers(number, chunk)
        self._arrivals[number] = self._streams.copy_in([(buffers[name], chunk[name]) for name in chunk], after)

    def _copy_chunk_out(self, number: int, chunk: StagedChunk) -> Event:
        buffers = self._ring.buffers(number, chunk)
        copies: list[Copy] = [(chunk[name], buffers[name]) for name in chunk]
        return self._streams.copy_out(copies, [self._streams.compute_event()])


NBYTES = 64 << 20  # of a copy
REPETITIONS = 4
FRACTION_WITH_COMPUTE = (
    0.9  # the share that is expected there; copies take no part of the device but its memory's bandwidth
)


def measure_host_bandwidth(mesh: Mesh) -> float | None:
    """Bytes per second in each direction, on the slowest rank, in some hundredths of a second; None on a CPU, where
    there is nothing to measure, and where a host pins no memory: whoever offloads is told by name. Gives all memory
    back. Collective."""
    if mesh.device.type == "cpu":
        return None
    host = HostMemory(mesh.device)
    try:
        ends = host.empty(NBYTES, torch.uint8), host.empty(NBYTES, torch.uint8)
    except HostMemoryError:
        ends = None
    dist.barrier(group=mesh.control_group)
    slowest = torch.tensor(0.0 if ends is None else _bytes_per_s(*ends, mesh.device), dtype=torch.float64)
    return all_min(slowest, mesh.control_group).item() or None


def _bytes_per_s(there: torch.Tensor, back: torch.Tensor, device: torch.device) -> float:
    sent, came = (torch.empty(NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    streams, best = copy_streams_of(device), 0.0
    for number in range(REPETITIONS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(torch.cuda.current_stream(device))
        both = [streams.copy_in([(sent, there)], [begun]), streams.copy_out([(back, came)], [begun])]
        for copy in both:
            streams.wait(copy)
        ended.record(torch.cuda.current_stream(device))
        ended.synchronize()
        if number:  # the first one wakes the device up
            best = max(best, NBYTES / (begun.elapsed_time(ended) * 1e-3))
    return best
