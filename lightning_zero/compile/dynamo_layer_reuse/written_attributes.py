"""Whether something has been written to a module, or to what it holds, while a graph is traced. It stays with Dynamo
until the graph runs: the module itself does not have it yet, and who reads it makes no guard."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import nn

__all__ = ["is_written_to"]

CONTAINERS = (list, tuple, set, frozenset)
DEPTH = 3  # of containers in containers


def is_written_to(module: nn.Module, objects: Set[int]) -> bool:
    """Whether ``objects``, ids, are of a module, of a part of it, or of something that one of these holds."""
    return bool(objects) and any(
        id(part) in objects or any(_has(value, objects, DEPTH) for value in vars(part).values())
        for part in module.modules()
    )


def _has(value: Any, objects: Set[int], depth: int) -> bool:
    if id(value) in objects:
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(_has(item, objects, depth - 1) for item in value.values())
    return isinstance(value, CONTAINERS) and any(_has(item, objects, depth - 1) for item in value)
