"""Convert ranges of a flattened tensor to hyper-rectangles (boxes), as DCP stores them.

A rank holds elements ``begin`` to ``end`` of a parameter in memory order. In ``n`` dimensions these are at most
``2 * n - 1`` boxes, and each box is contiguous in the rank's memory. :func:`tiling_error` checks that boxes cover a
tensor. Pure arithmetic.

Kept although DTensor computes such boxes: its shards are slices of one dimension, and ours are ranges of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

MAX_STEPS = 1 << 23  # corners, or pairs of boxes, of one tensor: about 10 s


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first index and its extent in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def permuted(self, dims: Sequence[int]) -> Box:
        """Return the box of the same elements in the tensor permuted by ``dims``."""
        return Box(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds ``outer``, which contains it."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, size, first in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def boxes(shape: Sequence[int], begin: int, end: int, max_numel: int | None = None) -> list[Box]:
    """Return the boxes of elements ``begin`` to ``end`` of a contiguous tensor, in memory order."""
    found = list(_boxes(tuple(shape), begin, end)) if end > begin else []
    return found if max_numel is None else [part for box in found for part in _cut(box, max_numel)]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # complete rows
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


def _cut(box: Box, max_numel: int) -> Iterator[Box]:
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.numel <= max_numel:
        yield box
        return
    step = max(1, max_numel // (box.numel // box.sizes[dim]))
    begin, size = box.offsets[dim], box.sizes[dim]
    for start in range(begin, begin + size, step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = start, min(step, begin + size - start)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), max_numel)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def tiling_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why boxes do not cover a tensor exactly, as the end of a sentence; None if they do.

    The difference of a box's indicator function along all dimensions is one sign at each of its corners. So boxes cover
    the tensor exactly if and only if their signed corners cancel out, except for those of the tensor. That test is
    exact and linear in the number of boxes.
    """
    filled = [box for box in boxes if box.numel]
    held, whole = sum(box.numel for box in filled), prod(shape)
    if held != whole:
        how = "overlap" if held > whole else "leave gaps"
        return f"do not make a whole: they {how}, and hold {held:,} elements of {whole:,}"
    if not whole:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in filled)]
    if len(filled) << len(dims) <= MAX_STEPS:
        covered = _corners_cancel(shape, filled, dims)
    elif len(filled) ** 2 <= MAX_STEPS:
        covered = not any(overlap(one, other) for one, other in combinations(filled, 2))
    else:
        return f"are too many to be checked: {len(filled):,} that are cut in {len(dims)} dimensions"
    return None if covered else "do not make a whole: they overlap in one place, and leave gaps in another"


def _corners_cancel(shape: Sequence[int], boxes: Sequence[Box], dims: Sequence[int]) -> bool:
    sums: dict[tuple[int, ...], int] = {}
    signs = [(-1) ** sum(ends) for ends in product((0, 1), repeat=len(dims))]
    for sign, offsets, sizes in (
        (-1, [0] * len(dims), [shape[dim] for dim in dims]),
        *((1, [box.offsets[dim] for dim in dims], [box.sizes[dim] for dim in dims]) for box in boxes),
    ):
        edges = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
        for corner, corner_sign in zip(product(*edges), signs, strict=True):
            count = sums.get(corner, 0) + sign * corner_sign
            if count:
                sums[corner] = count
            else:
                sums.pop(corner, None)
    return not sums
