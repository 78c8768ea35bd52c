"""Copy the tensors of a save to memory that the writer process maps, too.

On a GPU the copies run on their own stream, concurrently with the next forward and backward, and the device waits for
them before shards change (:meth:`Snapshot.before_writing`). Tensors on the host, such as offloaded ones, are copied by
threads, for which the host waits there. The memory is used again by the next save.

Adjacent tensors are copied as one run: a CUDA stream queues about a thousand copies, and then blocks the host. A large
model has more chunks than that, in a few flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.planner import PickledItem, TensorChunk
from lightning_zero.sharding.host_memory import copy_waiter
from lightning_zero.sharding.layout import is_strided
from lightning_zero.sharding.shared_memory import Claim, map_shared

COPY_BYTES = 256 << 20  # of one copy: others must not wait long for the copy engine
COPY_THREADS = 4
ALIGNMENT = 64  # bytes
MAX_GAP = 512  # bytes between two tensors of a run


@dataclass(frozen=True)
class SnapshotMemory:
    """The location of a snapshot's memory for another process."""

    path: str
    identity: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class SnapshotChunk:
    """A :class:`TensorChunk` whose values are in the snapshot's memory."""

    keys: tuple[str, ...]
    shape: torch.Size
    box: Box
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int

    def chunk(self, memory: Tensor) -> TensorChunk:
        """Return the chunk as a view of the 1-D uint8 ``memory``."""
        count = self.box.numel * self.dtype.itemsize
        values = memory[self.offset : self.offset + count].view(self.dtype).as_strided(self.box.sizes, self.strides)
        return TensorChunk(self.keys, self.shape, self.box, values)


class Snapshot:
    """Snapshots of one rank.

    Args:
        in_threads: copy tensors on the host in threads; None: if ``device`` is not the CPU.
    """

    def __init__(self, device: torch.device, in_threads: bool | None = None) -> None:
        self._device = device
        self._in_threads = device.type != "cpu" if in_threads is None else in_threads
        self._threads: ThreadPoolExecutor | None = None
        self._copying: list[Future[Tensor]] = []  # by threads
        self._claim: Claim | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._held: list[Tensor] = []  # sources of copies on the stream: the allocator must not use them again

    @property
    def memory(self) -> SnapshotMemory:
        assert self._claim is not None, "no snapshot was taken"
        return SnapshotMemory(self._claim.path, self._claim.identity, self._memory.numel())

    def take(self, items: Iterable[TensorChunk | PickledItem]) -> list[SnapshotChunk | PickledItem]:
        """Start to copy all tensors. Their values may change after :meth:`before_writing`."""
        self.wait()
        items = list(items)
        chunks = [item for item in items if isinstance(item, TensorChunk)]
        values = [dense_copy(chunk.values) for chunk in chunks]
        runs, offsets, end = layout_runs(values, [chunk.guarded for chunk in chunks])
        self.reserve(end)
        if self._in_threads:
            runs = [run if run.guarded else replace(run, memory=run.memory.clone()) for run in runs]
        on_device, on_host = [], runs
        if self._stream is not None:
            on_device = [run for run in runs if run.memory.device.type != "cpu"]
            on_host = [run for run in runs if run.memory.device.type == "cpu"]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for target, source in self._copies(on_device):
                    target.copy_(source, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
            self._held = [run.memory for run in on_device]
        wait_for_device = copy_waiter(self._device)  # its last D2H copies may still write to these tensors
        for target, source in self._copies(on_host):
            if self._in_threads:
                self._threads = self._threads or ThreadPoolExecutor(COPY_THREADS, "lightning_zero-snapshot")
                self._copying.append(self._threads.submit(_copy_after, wait_for_device, target, source))
            else:
                target.copy_(source)
        placed = (
            SnapshotChunk(chunk.keys, chunk.shape, chunk.box, value.dtype, value.stride(), offset)
            for chunk, value, offset in zip(chunks, values, offsets, strict=True)
        )
        return [next(placed) if isinstance(item, TensorChunk) else item for item in items]

    def _copies(self, runs: Iterable[MemoryRun]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield target and source of each copy."""
        for run in runs:
            for begin in range(0, run.memory.numel(), COPY_BYTES):
                part = run.memory[begin : begin + COPY_BYTES]
                yield self._memory[run.offset + begin :][: part.numel()], part

    def before_writing(self) -> None:
        """Order later work of this thread and of the current stream after the copies. Idempotent."""
        wait(self._copying)
        copied = self._copied  # read once: wait() in another thread resets it
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def wait(self) -> None:
        """Wait on the host until all copies are complete."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
            wait(self._copying)
            for copy in self._copying:
                copy.result()
        finally:
            self._copied, self._copying, self._held = None, [], []

    def close(self) -> None:
        """Free the memory."""
        self.wait()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._release()

    def reserve(self, count: int) -> None:
        """Allocate memory for ``count`` bytes. Takes seconds for many: pages are cleared and pinned."""
        if self._claim is not None and self._memory.numel() >= count:
            return
        self._release()
        self._claim = Claim.of(count)
        self._memory = map_shared(self._claim.path, self._claim.identity, max(count, 1), torch.uint8)
        if self._stream is not None:
            # Copies to pageable memory go through a small buffer, and block the host.
            with torch.cuda.device(self._device):  # a new thread would create a context on device 0
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


def _copy_after(wait_for: Callable[[], object], target: Tensor, source: Tensor) -> Tensor:
    wait_for()
    return target.copy_(source)


# -- runs of adjacent tensors


@dataclass(frozen=True)
class MemoryRun:
    """A range of memory that holds tensors with small gaps."""

    memory: Tensor
    offset: int
    guarded: bool


def dense_copy(values: Tensor) -> Tensor:
    """Return ``values`` if they are dense in memory, else a copy."""
    values = values.detach()
    plain = type(values) is Tensor and is_strided(values) and not values.is_conj() and not values.is_neg()
    if plain and _is_dense(values):
        return values
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def layout_runs(values: Sequence[Tensor], guarded: Sequence[bool]) -> tuple[list[MemoryRun], list[int], int]:
    """Combine tensors to runs, and place the runs in the snapshot.

    Returns:
        The runs; for each tensor, the offset of its first element in bytes; the bytes of the snapshot.
    """
    begins = [int(value.storage_offset()) * value.itemsize for value in values]
    runs: list[MemoryRun] = []
    offsets, end = [0] * len(values), 0
    for numbers in _neighbours(values, begins, guarded):
        first = begins[numbers[0]] // ALIGNMENT * ALIGNMENT
        count = max(begins[number] + values[number].nbytes for number in numbers) - first
        # Memory that numpy or another process shares several times has several storages, some shorter than the run.
        storage = max((values[number].untyped_storage() for number in numbers), key=lambda storage: storage.nbytes())
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        memory.set_(storage, first, (count,))  # type: ignore[call-overload]
        runs.append(MemoryRun(memory, end, guarded[numbers[0]]))
        for number in numbers:
            offsets[number] = end + begins[number] - first
        end += -(-count // ALIGNMENT) * ALIGNMENT
    return runs, offsets, end


def _neighbours(values: Sequence[Tensor], begins: Sequence[int], guarded: Sequence[bool]) -> list[list[int]]:
    """Return the numbers of the tensors of each run, in memory order."""
    places = [
        ((guarded[number], str(value.device), value.untyped_storage().data_ptr()), begins[number], number)
        for number, value in enumerate(values)
        if value.numel()
    ]
    found: list[list[int]] = []
    before, last = None, 0
    for storage, begin, number in sorted(places):
        if storage != before or begin > last + MAX_GAP:
            found.append([])
            last = begin
        found[-1].append(number)
        before, last = storage, max(last, begin + values[number].nbytes)
    return found


def _is_dense(values: Tensor) -> bool:
    """Return True if a tensor has neither gaps nor overlaps."""
    count = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size == 1:
            continue
        if stride != count:
            return False
        count *= size
    return True
