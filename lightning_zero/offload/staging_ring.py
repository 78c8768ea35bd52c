"""Stream data that is stored on the host through a ring of device buffers.

While compute uses one buffer, earlier chunks are copied back to the host, and later chunks are copied in. A
:class:`RingPass` first prefetches one chunk per buffer. ``open`` and ``close`` alternate for each chunk, and may be
captured in a CUDA graph between ``join`` and ``rejoin``. ``flush`` copies the last chunks out.

Three waits order copies and compute. A copy in waits for the compute before the pass, and for the copy out of the chunk
that had the buffer before, and of the same chunk in the last pass. A copy out waits for the compute that writes its
source. Copies of one direction stay in order, so waiting for the last one waits for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.mesh import Mesh, all_min
from lightning_zero.offload.pinned_memory import HostMemory

Copy = tuple[Tensor, Tensor]  # to, from
Event = Any


class CopyStreams(Protocol):
    """Copy between host and device concurrently with compute, which is the device's current stream.

    An event marks all work given to a stream so far. No method blocks the host. Tests replace this class by one that
    runs copies in the worst order.
    """

    def record_use(self, memory: Tensor) -> None:
        """Tell the allocator that copies use this memory, so that it is not reused before they finish."""
        ...

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event: ...

    def copy_out(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event: ...

    def compute_event(self) -> Event:
        """Return an event for all compute given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let compute wait for the event."""
        ...


class CudaCopyStreams:
    """Copy on two streams of a GPU, one per direction, which its copy engines serve concurrently.

    It may be captured in a CUDA graph, if the graph also contains all work that it waits for.
    """

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
    """Copy at once on a CPU, so that no wait is needed."""

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


MIN_SLOTS = 4  # one for compute, one for a copy out, two for copies in
MAX_SLOT_BYTES = 64 << 20  # larger copies are not faster per byte
ALIGNMENT = 512  # bytes, as in torch's allocator
MIN_TENSORS_PER_SLOT = 8  # a slot has room for 32 elements of this many tensors

StagedChunk = Mapping[str, Tensor]  # contiguous host tensors by name


def copy_outside_values(values: StagedChunk | None, to: StagedChunk) -> None:
    """Copy values into the tensors of the same names, where they are in other memory."""
    for name, value in (values or {}).items():
        if value.data_ptr() != to[name].data_ptr():
            to[name].copy_(value.reshape(-1))


class StagedChunks(list[StagedChunk]):
    """Hold the chunks of passes that are repeated."""


def _no_pass() -> None:
    """Refer to no chunks."""


class StagingRing:
    """Hold the buffers of a ring.

    Args:
        device: of the buffers.
        nbytes: of all buffers together, at most. They are allocated with the first pass, one per chunk at most.
        streams: for copies; by default the device's.
        stamp: returns another value after chunks may have been written without a change of their tensors' versions.

    Attributes:
        slots: number of buffers.
        longest_pass: number of chunks.
        last_copy_out: event of the last copy out, or None.
        last_pass: a reference to the last pass's chunks, if they are repeated, and events of its last copies out by
            chunk. It holds no chunk, so that dropped optimizer state is freed.
        pending_copies: events of copies in that compute has not waited for, by chunk, of the pass that uses the
            buffers. It does not hold the pass: a reference cycle would keep buffers and state until garbage collection.
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
        """Use buffers of ``nbytes`` from the next pass on. Not allowed during a pass."""
        if self.pending_copies:  # compute must wait for prefetches before their memory is freed
            self.streams.wait(next(reversed(self.pending_copies.values())))
            self.pending_copies.clear()
        if self.last_copy_out is not None:
            self.streams.wait(self.last_copy_out)
        before = self.slot_bytes
        self.slot_bytes = max(min(nbytes // MIN_SLOTS, MAX_SLOT_BYTES) // ALIGNMENT, MIN_TENSORS_PER_SLOT) * ALIGNMENT
        self.longest_pass = (
            self.longest_pass if self.slot_bytes == before else 0
        )  # the same state is split into other chunks
        self.slots = self._max_slots = max(nbytes // self.slot_bytes, MIN_SLOTS)
        self.last_pass: tuple[Callable[[], Sequence[StagedChunk] | None], dict[int, Event]] = _no_pass, {}
        self.pending_copies = {}
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def can_grow(self) -> bool:
        """Return True if :meth:`resize` would add buffers, because a later pass was longer than the first."""
        return self.slots < min(self._max_slots, self.longest_pass)

    def elements(self, itemsizes: Sequence[float], multiple: int = 32) -> int:
        """Return how many elements of several tensors fit into one buffer, a multiple of ``multiple``.

        It is at least ``multiple``. ``itemsizes`` are bytes per element. A tensor that has one element for several
        counts less than 1.
        """
        room = self.slot_bytes - len(itemsizes) * ALIGNMENT
        return max(int(room / max(sum(itemsizes), 1)) // multiple, 1) * multiple

    def allocated(self) -> Tensor:
        """Return the memory of all buffers, and allocate it if needed."""
        if self._memory is None:
            self.slots = max(min(self.slots, self.longest_pass), MIN_SLOTS)
            self._memory = torch.empty(self.slots * self.slot_bytes, dtype=torch.uint8, device=self._device)
            # The memory may be freed while copies are running.
            self.streams.record_use(self._memory)
        return self._memory

    def buffers(self, number: int, like: StagedChunk) -> dict[str, Tensor]:
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
    """Stream a sequence of chunks through a ring, which no other pass uses, once.

    A chunk without tensors copies nothing in, but may copy something out.
    """

    def __init__(self, ring: StagingRing, chunks: Sequence[StagedChunk]) -> None:
        self._ring, self._streams, self._chunks = ring, ring.streams, chunks
        self._arrivals: dict[int, Event] = {}  # by chunk, until compute has waited for them
        self._replaced: dict[int, StagedChunk] = {}  # targets that differ from the sources
        self._last_copy_out: Event = None
        self._prefetched_versions: list[Any] = []

    def prefetch(self) -> None:
        """Copy the first chunks in, each after its buffer is free and its own last copy out has finished."""
        self._ring.pending_copies = self._arrivals
        self._ring.longest_pass = max(self._ring.longest_pass, len(self._chunks))
        if any(self._chunks):
            # With deterministic algorithms torch fills new memory, by a kernel, which must run before the copies.
            self._ring.allocated()
        now, slots = self._streams.compute_event(), self._ring.slots
        (of, left), self._ring.last_pass = self._ring.last_pass, (_no_pass, {})
        # If the chunks are the same, the last one copied out of each buffer is known; others were copied out earlier.
        coming, count = {number % slots: event for number, event in left.items()}, min(slots, len(self._chunks))
        if of() is not self._chunks or len(coming) != count:
            coming = dict.fromkeys(range(count), self._ring.last_copy_out)
        for number, event in coming.items():
            self._copy_chunk_in(number, [now] if event is None else [now, event])
        self._prefetched_versions = self._source_versions()

    @property
    def is_valid(self) -> bool:
        """Return True if the prefetched chunks are still in the ring and their sources were not written to."""
        return self._ring.pending_copies is self._arrivals and self._prefetched_versions == self._source_versions()

    def _source_versions(self) -> list[Any]:
        coming = self._chunks[: self._ring.slots]
        return [self._ring.stamp(), *(tensor._version for chunk in coming for tensor in chunk.values())]

    def join(self) -> None:
        """Let compute wait for all prefetched chunks. Compute up to :meth:`rejoin` may be captured."""
        if self._arrivals:
            self._streams.wait(next(reversed(self._arrivals.values())))
        self._arrivals.clear()

    def open(self, number: int) -> dict[str, Tensor]:
        """Return the device tensors of this chunk, which compute may change until :meth:`close`."""
        if number in self._arrivals:
            self._streams.wait(self._arrivals.pop(number))
        return self._ring.buffers(number, self._chunks[number])

    def close(self, number: int, chunk: StagedChunk | None = None, values: StagedChunk | None = None) -> None:
        """Copy the chunk out if its buffer is needed; otherwise :meth:`flush` does.

        Args:
            number: of the opened chunk.
            chunk: target of the copy, if it differs from the source.
            values: device tensors that may be outside of the buffers.
        """
        chunk = self._replaced[number] = self._chunks[number] if chunk is None else chunk
        copy_outside_values(values, self._ring.buffers(number, chunk))
        if number + self._ring.slots < len(self._chunks):
            self._last_copy_out = self._copy_chunk_out(number, chunk)
            self._copy_chunk_in(number + self._ring.slots, [self._last_copy_out])

    def rejoin(self) -> None:
        """Let compute wait for all copies out."""
        if self._last_copy_out is not None:
            self._streams.wait(self._last_copy_out)

    def flush(self, numbers: Iterable[int] | None = None) -> None:
        """Copy out the chunks that are still in buffers: those with these numbers, or those that were closed."""
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


NBYTES = 64 << 20  # of a measured copy
REPETITIONS = 4
FRACTION_WITH_COMPUTE = 0.9  # expected share of the bandwidth during compute, which uses the memory, too


def measure_host_bandwidth(mesh: Mesh) -> float | None:
    """Return the bytes per second in each direction on the slowest rank. Collective.

    Both directions and all ranks copy concurrently.

    None on a CPU, and if a host cannot pin memory. All memory is freed.
    """
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


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    device_in, device_out = (torch.empty(NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    streams, best = copy_streams_of(device), 0.0
    for number in range(REPETITIONS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(torch.cuda.current_stream(device))
        both = [streams.copy_in([(device_in, source)], [begun]), streams.copy_out([(target, device_out)], [begun])]
        for copy in both:
            streams.wait(copy)
        ended.record(torch.cuda.current_stream(device))
        ended.synchronize()
        if number:  # the first one warms up
            best = max(best, NBYTES / (begun.elapsed_time(ended) * 1e-3))
    return best
