"""How much memory a tensor spans, with the gaps that its strides leave."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["reach"]


def reach(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from a tensor's first to its last, both included; 0 of one that has none."""
    pairs = list(zip(sizes, strides, strict=True))
    return 0 if any(size == 0 for size, _ in pairs) else 1 + sum((size - 1) * stride for size, stride in pairs)
