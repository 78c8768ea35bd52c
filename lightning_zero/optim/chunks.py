"""Segments in parts that are stepped one after the other: where their state lies on the host and passes through some
buffers of the device, or where what a step takes for a moment is to be small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_zero.offload.memory import HostMemory
from lightning_zero.offload.staging_ring import Load, Loads, Pass, Ring
from lightning_zero.optim.flat_runs import Segment
from lightning_zero.optim.rounding import Places

__all__ = ["MASTER", "MOMENTS", "InPlace", "Part", "Parts", "StateOnHost", "Stretch", "itemsizes_of", "stretches"]

MOMENTS = 1 << 22  # elements whose narrow state is float32 for a moment at once
MASTER = "master shard"  # among the names of a state, which are words of code


@dataclass(frozen=True)
class StateOnHost:
    """Where optimizers of one engine keep what has one element for each of a parameter's, and how it gets there.

    Attributes:
        memory: of the host.
        ring: through which state passes at each step.
    """

    memory: HostMemory
    ring: Ring


@dataclass(frozen=True)
class Stretch:
    """Some neighbouring elements of a segment."""

    segment: Segment
    begin: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """The part of a tensor that has the segment's elements: 1-D, a view."""
        return flat.detach().view(-1)[self.begin : self.end]

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The part of the segment's state, by name; and of the master shards, where they lie on the host. These come
        first, so that they are at one place of a buffer, whatever state there is."""
        master = {} if self.segment.on_host is None else {MASTER: self.of(self.segment.on_host)}
        return master | {name: self.of(self.segment.state[name]) for name in names}

    def places(self, whole: Mapping[int, Places]) -> Places | None:
        """Where its elements stand, if that is known of its segment, by id."""
        places = whole.get(id(self.segment))
        return None if places is None else places.part(self.begin, self.end)


class Part(NamedTuple):
    """A stretch on the device, as it is stepped.

    Attributes:
        stretch: which.
        param: its elements of the master shards.
        copy: their compute copies, where these are to be written; otherwise None.
        state: by name.
        places: where its elements stand, if some of the state is narrow.
    """

    stretch: Stretch
    param: Tensor
    copy: Tensor | None
    state: dict[str, Tensor]
    places: Places | None


def itemsizes_of(segment: Segment, state: Sequence[int]) -> list[int]:
    """Bytes of an element of each tensor that comes from the host, where those of the state are given."""
    return [*state, *([] if segment.on_host is None else [segment.on_host.itemsize])]


def stretches(segment: Segment, most: int) -> list[Stretch]:
    """The whole segment, in parts of at most so many elements."""
    numel = segment.param.numel()
    return [Stretch(segment, begin, min(begin + most, numel)) for begin in range(0, numel, most)]


class InPlace:
    """Replace :class:`~lightning_zero.offload.staging_ring.Pass` for state on the device, which needs no copies."""

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


class Parts:
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
        segments: Sequence[Segment],
        names: Callable[[Segment], Sequence[str]],
        ring: Ring | None,
        most: int | None = None,
    ) -> None:
        self._ring = ring
        self._masters = any(segment.on_host is not None for segment in segments)
        self._parts: list[Stretch] = []
        for segment in segments:
            itemsizes = itemsizes_of(segment, [segment.state[name].itemsize for name in names(segment)])
            numel = ring.elements(itemsizes) if ring and itemsizes else segment.param.numel()
            self._parts += stretches(segment, min(numel, most) if segment.narrow and most else numel)
        self.places = {id(s): Places.of(s.members, s.param.device) for s in segments if s.narrow}
        self._places = [part.places(self.places) for part in self._parts]
        self._loads = Loads(part.load(names(part.segment)) for part in self._parts)
        self._ahead: Pass | None = None

    def bring_ahead(self) -> None:
        """State begins to come for the next step, as far as there is room. Harmless when repeated, and when that step
        is never made."""
        if self._ring is not None and (self._ahead is None or not self._ahead.is_good):
            self._ahead = Pass(self._ring, self._loads)
            self._ahead.ahead()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds :meth:`with_state`, or the replay of a graph in which that was captured."""
        self.bring_ahead()
        through, self._ahead = self._ahead, None
        if through is not None:
            through.join()
        yield
        if through is not None:
            through.leave(range(len(self._loads)))
            if self._masters:  # which anybody may read from here on, as a tensor of the device
                through.rejoin()

    def with_state(self) -> Iterator[Part]:
        """Each stretch with its state on the device; what is written to that, and to the parameter, until the next one
        is asked for goes back to where it came from."""
        through = InPlace(self._loads) if self._ring is None else Pass(self._ring, self._loads)
        for number, part in enumerate(self._parts):
            state, segment = through.open(number), part.segment
            param = state.pop(MASTER) if segment.on_host is not None else part.of(segment.param)
            copy = None if segment.copy is None else part.of(segment.copy)
            yield Part(part, param, copy, state, self._places[number])
            through.close(number)
        through.rejoin()
