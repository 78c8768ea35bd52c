"""Segments in parts that are stepped one after the other, where their state lies on the host and passes through a few
buffers of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.offload.memory import HostMemory
from lightning_zero.offload.ring import Pass, Ring
from lightning_zero.optim.segments import Segment

__all__ = ["StateOnHost", "Stretch", "passing", "stretches"]


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
        """The part of the segment's state, by name."""
        return {name: self.of(self.segment.state[name]) for name in names}


def stretches(segment: Segment, most: int) -> list[Stretch]:
    """The whole segment, in parts of at most so many elements."""
    numel = segment.param.numel()
    return [Stretch(segment, begin, min(begin + most, numel)) for begin in range(0, numel, most)]


def passing(ring: Ring, parts: Sequence[tuple[Stretch, Sequence[str]]]) -> Iterator[tuple[Stretch, dict[str, Tensor]]]:
    """Each stretch with the state of these names, on the device. What is written there until the next one is asked for
    goes back to the host."""
    through = Pass(ring, [stretch.load(names) for stretch, names in parts])
    for number, (stretch, _) in enumerate(parts):
        yield stretch, through.open(number)
        through.close(number)
    through.end()
