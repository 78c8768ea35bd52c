"""Segments in parts that are stepped one after the other: where their state lies on the host and passes through some
buffers of the device, or where what a step takes for a moment is to be small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_zero.offload.memory import HostMemory
from lightning_zero.offload.staging_ring import Load, Loads, Pass, Ring
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.rounding import ElementPositions

__all__ = [
    "MASTER_SHARD",
    "MAX_CHUNK_NUMEL",
    "Chunk",
    "ChunkedState",
    "InPlacePass",
    "LoadedChunk",
    "StateOnHost",
    "chunk_itemsizes",
    "split_into_chunks",
]

MAX_CHUNK_NUMEL = 1 << 22  # elements that are float32 at a time; bounds the memory of a step that is not compiled
MASTER_SHARD = "master shard"  # key next to the names of state, which are identifiers


@dataclass(frozen=True)
class StateOnHost:
    """Host memory of one engine's shard-sized optimizer state, and its staging ring.

    Attributes:
        memory: Host memory.
        ring: Staging ring for each step's state.
    """

    memory: HostMemory
    ring: Ring


@dataclass(frozen=True)
class Chunk:
    """Neighboring elements of a flat run, stepped at once."""

    run: FlatRun
    begin: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this chunk's part of a tensor with the run's elements, as a 1-D view."""
        return flat.detach().view(-1)[self.begin : self.end]

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return this chunk's part of the run's state by name, and of offloaded master shards.

        Master shards are first: their place in the staging buffer then does not depend on the state.
        """
        master = {} if self.run.on_host is None else {MASTER_SHARD: self.of(self.run.on_host)}
        return master | {name: self.of(self.run.state[name]) for name in names}

    def positions(self, whole: Mapping[int, ElementPositions]) -> ElementPositions | None:
        """Return the positions of this chunk's elements; None if its run has none."""
        positions = whole.get(id(self.run))
        return None if positions is None else positions.part(self.begin, self.end)


class LoadedChunk(NamedTuple):
    """A chunk on the device.

    Attributes:
        chunk: The chunk.
        param: Its elements of the master shards.
        copy: Its compute shard, if the step writes it; otherwise None.
        state: State by name.
        positions: Positions of its elements if some state is bfloat16.
    """

    chunk: Chunk
    param: Tensor
    copy: Tensor | None
    state: dict[str, Tensor]
    positions: ElementPositions | None


def chunk_itemsizes(run: FlatRun, state: Sequence[int]) -> list[int]:
    """Return the bytes per element of each tensor that is copied from the host, given those of the state."""
    return [*state, *([] if run.on_host is None else [run.on_host.itemsize])]


def split_into_chunks(run: FlatRun, most: int) -> list[Chunk]:
    """Split a run into chunks of at most ``most`` elements."""
    numel = run.param.numel()
    return [Chunk(run, begin, min(begin + most, numel)) for begin in range(0, numel, most)]


class InPlacePass:
    """Replaces the staging ring's ``Pass`` for state on the device, which needs no copies."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def ahead(self) -> None:
        pass

    def open(self, number: int) -> dict[str, Tensor]:
        return dict(self._loads[number])

    def close(self, number: int, load: Load | None = None, values: Load | None = None) -> None:
        to = self._loads[number] if load is None else load
        for name, value in (values or {}).items():
            if value.data_ptr() != to[name].data_ptr():
                to[name].copy_(value.reshape(-1))

    def leave(self) -> None:
        pass

    def rejoin(self) -> None:
        pass


class ChunkedState:
    """Flat runs in chunks, and the transfer of each chunk's state.

    Args:
        runs: Flat runs with complete state, at fixed addresses.
        names: Returns the names of a run's state.
        ring: Staging ring; None if state is on the device, and runs are not split.
        most: Maximum number of elements of a chunk with bfloat16 state; None: no limit.

    Attributes:
        positions: Element positions of the runs with bfloat16 state, by run id.
    """

    def __init__(
        self,
        runs: Sequence[FlatRun],
        names: Callable[[FlatRun], Sequence[str]],
        ring: Ring | None,
        most: int | None = None,
    ) -> None:
        self._ring = ring
        self._masters = any(run.on_host is not None for run in runs)
        self._parts: list[Chunk] = []
        for run in runs:
            itemsizes = chunk_itemsizes(run, [run.state[name].itemsize for name in names(run)])
            numel = ring.elements(itemsizes) if ring and itemsizes else run.param.numel()
            self._parts += split_into_chunks(run, min(numel, most) if run.bf16_state and most else numel)
        self.positions = {id(s): ElementPositions.of(s.members, s.param.device) for s in runs if s.bf16_state}
        self._positions = [part.positions(self.positions) for part in self._parts]
        self._loads = Loads(part.load(names(part.run)) for part in self._parts)
        self._ahead: Pass | None = None

    def prefetch_from_host(self) -> None:
        """Start to copy state for the next step, as far as the ring has space.

        Idempotent; the step need not follow.
        """
        if self._ring is not None and (self._ahead is None or not self._ahead.is_good):
            self._ahead = Pass(self._ring, self._loads)
            self._ahead.ahead()

    @contextmanager
    def stream_state(self) -> Iterator[None]:
        """Surround :meth:`iter_chunks`, or the replay of a graph that captured it."""
        self.prefetch_from_host()
        through, self._ahead = self._ahead, None
        if through is not None:
            through.join()
        yield
        if through is not None:
            through.leave(range(len(self._loads)))
            if self._masters:  # the compute stream may read them from here on
                through.rejoin()

    def iter_chunks(self) -> Iterator[LoadedChunk]:
        """Yield each chunk with its state on the device.

        Writes to state and parameter are copied back before the next chunk is yielded.
        """
        through = InPlacePass(self._loads) if self._ring is None else Pass(self._ring, self._loads)
        for number, part in enumerate(self._parts):
            state, run = through.open(number), part.run
            param = state.pop(MASTER_SHARD) if run.on_host is not None else part.of(run.param)
            copy = None if run.copy is None else part.of(run.copy)
            yield LoadedChunk(part, param, copy, state, self._positions[number])
            through.close(number)
        through.rejoin()
