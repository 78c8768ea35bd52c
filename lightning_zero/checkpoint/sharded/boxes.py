"""A range of a flattened tensor as hyper-rectangles of that tensor: what sharded checkpoints speak of. Pure arithmetic.

A rank holds elements ``begin`` to ``end`` of a parameter in the order of its memory. Of a tensor of ``n`` dimensions
that is at most ``2 * n - 1`` boxes: the rest of a row, whole rows, the beginning of a row, for each dimension. Every
box is one piece of that memory, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Box", "boxes", "overlap"]


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets: its first index in each dimension.
        sizes: its extent in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def permuted(self, dims: Sequence[int]) -> Box:
        """Of the tensor permuted by ``dims``, the same elements."""
        return Box(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds ``outer``, which surrounds it."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, size, first in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def boxes(shape: Sequence[int], begin: int, end: int, most: int | None = None) -> list[Box]:
    """The boxes that hold elements ``begin`` to ``end`` of a contiguous tensor, in the order of its memory.

    Args:
        shape: the tensor's.
        begin: position of the first element in the flattened tensor.
        end: one past the position of the last.
        most: larger boxes are cut, so that each has at most so many elements.
    """
    found = list(_boxes(tuple(shape), begin, end)) if end > begin else []
    return found if most is None else [part for box in found for part in _cut(box, most)]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, begin, end)
        return
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], number: int, begin: int, end: int) -> Iterator[Box]:
    start = number * prod(shape[1:])
    for box in _boxes(shape[1:], begin - start, end - start):
        yield Box((number, *box.offsets), (1, *box.sizes))


def _cut(box: Box, most: int) -> Iterator[Box]:
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.numel <= most:
        yield box
        return
    step = max(1, most // (box.numel // box.sizes[dim]))
    begin, size = box.offsets[dim], box.sizes[dim]
    for start in range(begin, begin + size, step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = start, min(step, begin + size - start)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), most)


def overlap(one: Box, other: Box) -> Box | None:
    """What is in both boxes; None where nothing is."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None
