"""Values that lie side by side are copied as one.

A stream of a GPU takes about a thousand copies that it has not made yet; whoever asks for more waits until it has made
some. A large model's pieces are more than that, and lie in a few arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.sharding.layout import is_strided

__all__ = ["ALIGNMENT", "Run", "dense_copy", "layout_runs"]

ALIGNMENT = 64  # bytes
GAP = 512  # bytes between two values that are worth no copy of their own


@dataclass(frozen=True)
class Run:
    """Memory that holds values, and little else.

    Attributes:
        memory: 1-D, uint8; a view of theirs.
        offset: in bytes, where it belongs in what it is copied to.
        guarded: as all its values are, see :class:`~lightning_zero.checkpoint.sharded.writing.Piece`.
    """

    memory: Tensor
    offset: int
    guarded: bool


def dense_copy(values: Tensor) -> Tensor:
    """The same values where they fill a stretch of memory: themselves, or a copy."""
    values = values.detach()
    plain = type(values) is Tensor and is_strided(values) and not values.is_conj() and not values.is_neg()
    if plain and _is_dense(values):
        return values
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def layout_runs(values: Sequence[Tensor], guarded: Sequence[bool]) -> tuple[list[Run], list[int], int]:
    """Where values go.

    Args:
        values: that :func:`dense_copy` has given.
        guarded: of each, whether it is.

    Returns:
        The runs that hold them all; of each value, the offset in bytes of its first element in memory; and the size of
        that memory in bytes.
    """
    begins = [int(value.storage_offset()) * value.itemsize for value in values]
    runs: list[Run] = []
    offsets, end = [0] * len(values), 0
    for numbers in _neighbours(values, begins, guarded):
        first = begins[numbers[0]] // ALIGNMENT * ALIGNMENT
        count = max(begins[number] + values[number].nbytes for number in numbers) - first
        # What numpy or another process has lent several times has a storage each, some shorter than the run.
        storage = max((values[number].untyped_storage() for number in numbers), key=lambda storage: storage.nbytes())
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        memory.set_(storage, first, (count,))  # type: ignore[call-overload]
        runs.append(Run(memory, end, guarded[numbers[0]]))
        for number in numbers:
            offsets[number] = end + begins[number] - first
        end += -(-count // ALIGNMENT) * ALIGNMENT
    return runs, offsets, end


def _neighbours(values: Sequence[Tensor], begins: Sequence[int], guarded: Sequence[bool]) -> list[list[int]]:
    """Numbers of the values that make a run, in the order of memory, for each."""
    places = [
        ((guarded[number], str(value.device), value.untyped_storage().data_ptr()), begins[number], number)
        for number, value in enumerate(values)
        if value.numel()
    ]
    found: list[list[int]] = []
    before, last = None, 0
    for storage, begin, number in sorted(places):
        if storage != before or begin > last + GAP:
            found.append([])
            last = begin
        found[-1].append(number)
        before, last = storage, max(last, begin + values[number].nbytes)
    return found


def _is_dense(values: Tensor) -> bool:
    """Whether it has neither gaps nor overlaps."""
    count = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size == 1:
            continue
        if stride != count:
            return False
        count *= size
    return True
