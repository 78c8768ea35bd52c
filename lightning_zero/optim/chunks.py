"""Segments in parts that are stepped one after the other: where their state lies on the host and passes through some
buffers of the device, or where what a step takes for a moment is to be small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import RingPass, StagedChunk, StagedChunks, StagingRing
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.rounding import ElementPositions

__all__ = [
    "MASTER_SHARD",
    "MAX_CHUNK_NUMEL",
    "InPlacePass",
    "LoadedChunk",
    "ChunkedState",
    "StateOnHost",
    "Chunk",
    "chunk_itemsizes",
    "split_into_chunks",
]

MAX_CHUNK_NUMEL = 1 << 22  # elements whose narrow state is float32 for a moment at once
MASTER_SHARD = "master shard"  # among the names of a state, which are words of code


@dataclass(frozen=True)
class StateOnHost:
    """Where optimizers of one engine keep what has one element for each of a parameter's, and how it gets there.

    Attributes:
        memory: of the host.
        ring: through which state passes at each step.
    """

    memory: HostMemory
    ring: StagingRing


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring elements of a segment."""

    run: FlatRun
    begin: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """The part of a tensor that has the segment's elements: 1-D, a view."""
        return flat.detach().view(-1)[self.begin : self.end]

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The part of the segment's state, by name; and of the master shards, where they lie on the host. These come
        first, so that they are at one place of a buffer, whatever state there is."""
        master = {} if self.run.on_host is None else {MASTER_SHARD: self.of(self.run.on_host)}
        return master | {name: self.of(self.run.state[name]) for name in names}

    def positions(self, whole: Mapping[int, ElementPositions]) -> ElementPositions | None:
        """Where its elements stand, if that is known of its segment, by id."""
        positions = whole.get(id(self.run))
        return None if positions is None else positions.part(self.begin, self.end)


class LoadedChunk(NamedTuple):
    """A stretch on the device, as it is stepped.

    Attributes:
        stretch: which.
        param: its elements of the master shards.
        copy: their compute copies, where these are to be written; otherwise None.
        state: by name.
        places: where its elements stand, if some of the state is narrow.
    """

    chunk: Chunk
    param: Tensor
    copy: Tensor | None
    state: dict[str, Tensor]
    positions: ElementPositions | None


def chunk_itemsizes(run: FlatRun, state: Sequence[int]) -> list[int]:
    """Bytes of an element of each tensor that comes from the host, where those of the state are given."""
    return [*state, *([] if run.on_host is None else [run.on_host.itemsize])]


def split_into_chunks(run: FlatRun, most: int) -> list[Chunk]:
    """The whole segment, in parts of at most so many elements."""
    numel = run.param.numel()
    return [Chunk(run, begin, min(begin + most, numel)) for begin in range(0, numel, most)]


class InPlacePass:
    """Replace :class:`~lightning_zero.offload.staging_ring.RingPass` for state on the device, which needs no copies."""

    def __init__(self, loads: Sequence[StagedChunk]) -> None:
        self._loads = loads

    def prefetch(self) -> None:
        pass

    def open(self, number: int) -> dict[str, Tensor]:
        return dict(self._loads[number])

    def close(self, number: int, load: StagedChunk | None = None, values: StagedChunk | None = None) -> None:
        to = self._loads[number] if load is None else load
        for name, value in (values or {}).items():
            if value.data_ptr() != to[name].data_ptr():
                to[name].copy_(value.reshape(-1))

    def flush(self) -> None:
        pass

    def rejoin(self) -> None:
        pass


class ChunkedState:
    """Segments, in the stretches that are stepped at once, and how each gets its state.

    Args:
        segments: all of whose state exists, and stays where it is.
        names: of the state of each.
        ring: through which it passes; None: it lies on the device, and segments stay whole.
        most: elements of a stretch with narrow state; None: as many as there are.

    Attributes:
        places: of the segments with narrow state, by their ids.
    """

    def __init__(
        self,
        runs: Sequence[FlatRun],
        names: Callable[[FlatRun], Sequence[str]],
        ring: StagingRing | None,
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
        self._loads = StagedChunks(part.load(names(part.run)) for part in self._parts)
        self._ahead: RingPass | None = None

    def prefetch_from_host(self) -> None:
        """State begins to come for the next step, as far as there is room. Harmless when repeated, and when that step
        is never made."""
        if self._ring is not None and (self._ahead is None or not self._ahead.is_valid):
            self._ahead = RingPass(self._ring, self._loads)
            self._ahead.prefetch()

    @contextmanager
    def stream_state(self) -> Iterator[None]:
        """Surrounds :meth:`iter_chunks`, or the replay of a graph in which that was captured."""
        self.prefetch_from_host()
        through, self._ahead = self._ahead, None
        if through is not None:
            through.join()
        yield
        if through is not None:
            through.flush(range(len(self._loads)))
            if self._masters:  # which anybody may read from here on, as a tensor of the device
                through.rejoin()

    def iter_chunks(self) -> Iterator[LoadedChunk]:
        """Each stretch with its state on the device; what is written to that, and to the parameter, until the next one
        is asked for goes back to where it came from."""
        through = InPlacePass(self._loads) if self._ring is None else RingPass(self._ring, self._loads)
        for number, part in enumerate(self._parts):
            state, run = through.open(number), part.run
            param = state.pop(MASTER_SHARD) if run.on_host is not None else part.of(run.param)
            copy = None if run.copy is None else part.of(run.copy)
            yield LoadedChunk(part, param, copy, state, self._positions[number])
            through.close(number)
        through.rejoin()
