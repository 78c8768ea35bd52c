"""Check that the boxes in which a tensor is stored cover it, each element once. Pure arithmetic.

A box's indicator function is 1 within it. The indicators of boxes add up to that of the whole tensor if and only if
their differences along all dimensions do, and the difference of a box's indicator is one sign at each of its corners.
So the corners of all boxes must cancel out except for those of the whole: exact, and linear in the number of boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import prod

from lightning_zero.checkpoint.sharded.boxes import Box, overlap

__all__ = ["uncovered"]

MOST_STEPS = 1 << 23  # corners, or pairs of boxes, of one tensor: some 10 s


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return what is wrong with the boxes of a tensor, as the end of a sentence; None if they cover it exactly.

    Args:
        shape: of the tensor.
        boxes: each within the tensor.
    """
    filled = [box for box in boxes if box.numel]
    held, whole = sum(box.numel for box in filled), prod(shape)
    if held != whole:
        how = "overlap" if held > whole else "leave gaps"
        return f"do not make a whole: they {how}, and hold {held:,} elements of {whole:,}"
    if not whole:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in filled)]
    if len(filled) << len(dims) <= MOST_STEPS:
        covered = _corners_cancel(shape, filled, dims)
    elif len(filled) ** 2 <= MOST_STEPS:
        covered = not any(overlap(one, other) for one, other in combinations(filled, 2))
    else:
        return f"are too many to be checked: {len(filled):,} that are cut in {len(dims)} dimensions"
    return None if covered else "do not make a whole: they overlap in one place, and leave gaps in another"


def _corners_cancel(shape: Sequence[int], boxes: Sequence[Box], dims: Sequence[int]) -> bool:
    """Return True if signed corners of boxes cancel out but for those of the whole, in the dimensions that are cut."""
    left: dict[tuple[int, ...], int] = {}
    signs = [(-1) ** sum(ends) for ends in product((0, 1), repeat=len(dims))]
    for sign, offsets, sizes in (
        (-1, [0] * len(dims), [shape[dim] for dim in dims]),
        *((1, [box.offsets[dim] for dim in dims], [box.sizes[dim] for dim in dims]) for box in boxes),
    ):
        edges = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
        for corner, way in zip(product(*edges), signs, strict=True):
            count = left.get(corner, 0) + sign * way
            if count:
                left[corner] = count
            else:
                left.pop(corner, None)
    return not left
