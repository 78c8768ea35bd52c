"""What each rank writes of a state: its own boxes of what is sharded; rank 0 everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.boxes import Box, boxes
from lightning_zero.checkpoint.sharded.paths import MOST_LEVELS, Keys
from lightning_zero.checkpoint.sharded.values import CheckpointShard
from lightning_zero.checkpoint.sharded.writing import Blob, Piece, packed
from lightning_zero.sharding.layout import is_strided

__all__ = ["bytes_to_write", "flattened", "plan_items"]

PIECE_BYTES = 64 << 20  # so that another world size need not read much more than its part


def flattened(state: Mapping[str, Any]) -> dict[str, tuple[Keys, Any]]:
    """Nested dicts, and lists in which there are dicts or tensors, as one dict: what is where, by its path with dots.

    That is how torch's distributed checkpoints name things. They have no other keys than strings, and none below
    tuples: dicts with other keys are kept whole, as one object.

    Raises:
        ValueError: two things would have the same name; containers are nested too deeply; or what is sharded stands
            where it cannot be named.
    """
    found: dict[str, tuple[Keys, Any]] = {}
    for path, value in _leaves((), state):
        if len(path) > MOST_LEVELS:
            raise ValueError(
                f"In the checkpoint, containers are nested in more than {MOST_LEVELS} levels at "
                f"{'.'.join(map(str, path[:3]))!r}. Sharded checkpoints hold no more: save it as one flat dict."
            )
        name = ".".join(map(str, path))
        if name in found:
            raise ValueError(f"Two entries of the checkpoint have the same name when it is flattened: {name!r}.")
        found[name] = path, value
    return found


def _leaves(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        other = next((key for key in value if not isinstance(key, str)), None)
        if other is not None:
            yield path, _whole(path, value, f"a dict with the key {other!r}, of type {type(other).__name__}")
            return
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list) and _is_opened(value):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)
    elif isinstance(value, tuple):
        yield path, _whole(path, value, "a tuple")
    else:
        yield path, value


def _whole(path: Keys, value: Any, what: str) -> Any:
    """What is pickled: of plain containers, which are unpickled again whatever they were, and without shards, of which
    no rank has all."""
    if isinstance(value, CheckpointShard):
        name = ".".join(map(str, path))
        raise ValueError(
            f"In the checkpoint, {name or 'what is saved'!r} is {what}, and holds sharded values. Sharded checkpoints "
            "name these by strings: put them into dicts whose keys are strings, or into lists."
        )
    if isinstance(value, Mapping):
        return {key: _whole(path, inner, what) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(path, inner, what) for inner in value)
    return value


def _is_opened(value: list[Any]) -> bool:
    return any(isinstance(x, Mapping | Tensor) or (isinstance(x, list) and _is_opened(x)) for x in value)


def bytes_to_write(state: Mapping[str, Any], rank: int) -> int:
    """Of the tensors that ``rank`` writes of a nested state; tied ones once."""
    sizes: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, CheckpointShard):
            begin, end = value.range
            sizes[id(value)] = (end - begin) * value.dtype.itemsize
        elif isinstance(value, Tensor):
            sizes[id(value)] = value.nbytes if rank == 0 and is_strided(value) else 0
        elif isinstance(value, Mapping):
            for inner in value.values():
                add(inner)
        elif isinstance(value, list):
            for inner in value:
                add(inner)

    add(state)
    return sum(sizes.values())


def plan_items(state: Mapping[str, tuple[Keys, Any]], rank: int) -> Iterator[Piece | Blob]:
    """What ``rank`` writes of a flattened state, in its order. Tied values are written once."""
    keys: dict[int, list[str]] = {}
    for key, (_, value) in state.items():
        keys.setdefault(id(value) if isinstance(value, Tensor) else id(key), []).append(key)
    for key, (_, value) in state.items():
        if not isinstance(value, Tensor):
            if rank == 0:
                yield Blob((key,), packed(value))
            continue
        names = keys.pop(id(value), None)
        if names is None:
            continue
        if not is_strided(value):  # it cannot be cut into boxes
            if rank == 0:
                yield Blob(tuple(names), packed(value.detach().cpu()))
            continue
        if isinstance(value, CheckpointShard):
            parts = value.parts(PIECE_BYTES // value.dtype.itemsize)
        else:
            parts = _cut(value.detach()) if rank == 0 else []
        if rank == 0 and not value.numel():  # it has a shape, though
            parts = [(Box((0,) * value.dim(), tuple(value.shape)), torch.empty(value.shape, dtype=value.dtype))]
        for box, values in parts:
            yield Piece(tuple(names), value.shape, box, values, guarded=isinstance(value, CheckpointShard))


def _cut(value: Tensor) -> list[tuple[Box, Tensor]]:
    whole = Box((0,) * value.dim(), tuple(value.shape))
    found = boxes(value.shape, 0, value.numel(), PIECE_BYTES // value.dtype.itemsize)
    return [(box, value[box.within(whole)]) for box in found]
