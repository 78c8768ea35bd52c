"""How much memory a tensor spans, with the gaps that its strides leave."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["should_read_gaps", "extent"]


def extent(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from a tensor's first to its last, both included; 0 of one that has none."""
    pairs = list(zip(sizes, strides, strict=True))
    return 0 if any(size == 0 for size, _ in pairs) else 1 + sum((size - 1) * stride for size, stride in pairs)


def should_read_gaps(values: Tensor, block: int) -> bool:
    """Whether to read all of what a tensor spans at once: its gaps are no more than itself, or it is no more than one
    read of so many bytes."""
    span = extent(values.shape, values.stride())
    return span <= 2 * values.numel() or span * values.itemsize <= block
