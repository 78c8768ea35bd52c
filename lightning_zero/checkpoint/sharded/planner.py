"""Plan a sharded save: flatten the nested state, and list the items that each rank writes.

Each rank writes the boxes of its shards; rank 0 writes everything else. :func:`flatten_state` names entries as DCP
does, and :func:`nest_state` is its inverse. It trusts no paths of a file: it refuses paths that contradict each other,
and makes no list longer than its number of entries.

Kept although DCP has SavePlanner and FileSystemWriter, which would save about 100 lines (read in torch 2.13).
Checksums, atomic commit and one error on all ranks would remain ours. So would reading:
``FileSystemReader.read_metadata`` unpickles arbitrary classes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.boxes import Box, boxes
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.sharding.layout import is_strided

Keys = tuple[str | int, ...]  # keys of nested dicts and lists on the path to a value

MAX_LEVELS = 200  # of nested containers: functions recurse over them, and Python's limit is 1,000 calls
CHUNK_BYTES = 64 << 20  # a rank of another world size then reads little more than its part


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor, to be written.

    Attributes:
        keys: of the tensor in the checkpoint; several if parameters are tied.
        values: of the box's sizes, on any device.
        guarded: writes to the values are announced, as those to shards; other values may change at any time.
    """

    keys: tuple[str, ...]
    shape: torch.Size
    box: Box
    values: Tensor
    guarded: bool = False

    @property
    def bytes(self) -> int:
        return self.box.numel * self.values.dtype.itemsize


@dataclass(frozen=True)
class PickledItem:
    """A value that is no strided tensor, as :func:`serialize` returns it."""

    keys: tuple[str, ...]
    data: bytes

    @property
    def bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class StoredItem:
    """The location of a written item."""

    keys: tuple[str, ...]
    file: str
    offset: int
    length: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    box: Box | None = None


def serialize(value: Any) -> bytes:
    """Return ``value`` as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def bytes_to_write(state: Mapping[str, Any], rank: int) -> int:
    """Return the bytes of tensors that ``rank`` writes of a nested state; tied tensors count once."""
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


def plan_items(state: Mapping[str, tuple[Keys, Any]], rank: int) -> Iterator[TensorChunk | PickledItem]:
    """Yield the items that ``rank`` writes of a flattened state. Tied values are written once."""
    keys: dict[int, list[str]] = {}
    for key, (_, value) in state.items():
        keys.setdefault(id(value) if isinstance(value, Tensor) else id(key), []).append(key)
    for key, (_, value) in state.items():
        if not isinstance(value, Tensor):
            if rank == 0:
                yield PickledItem((key,), serialize(value))
            continue
        names = keys.pop(id(value), None)
        if names is None:
            continue
        if not is_strided(value):  # it has no boxes
            if rank == 0:
                yield PickledItem(tuple(names), serialize(value.detach().cpu()))
            continue
        if isinstance(value, CheckpointShard):
            parts = value.parts(CHUNK_BYTES // value.dtype.itemsize)
        else:
            parts = _cut(value.detach()) if rank == 0 else []
        if rank == 0 and not value.numel():  # it has a shape and a dtype
            parts = [(Box.whole(value.shape), torch.empty(value.shape, dtype=value.dtype))]
        for box, values in parts:
            yield TensorChunk(tuple(names), value.shape, box, values, guarded=isinstance(value, CheckpointShard))


def _cut(value: Tensor) -> list[tuple[Box, Tensor]]:
    whole = Box.whole(value.shape)
    found = boxes(value.shape, 0, value.numel(), CHUNK_BYTES // value.dtype.itemsize)
    return [(box, value[box.within(whole)]) for box in found]


# -- paths


def flatten_state(state: Mapping[str, Any]) -> dict[str, tuple[Keys, Any]]:
    """Flatten nested dicts, and lists with dicts or tensors, to values by their path with dots.

    DCP names entries so. Its paths have only string keys and do not enter tuples: a dict with other keys is one value.

    Raises:
        ValueError: two values have the same name; containers are nested too deeply; or a shard has no such name.
    """
    found: dict[str, tuple[Keys, Any]] = {}
    for path, value in _leaves((), state):
        if len(path) > MAX_LEVELS:
            raise ValueError(
                f"In the checkpoint, containers are nested in more than {MAX_LEVELS} levels at "
                f"{'.'.join(map(str, path[:3]))!r}. Sharded checkpoints hold no more: save it as one flat dict."
            )
        name = ".".join(map(str, path))
        if name in found:
            raise ValueError(f"Two entries of the checkpoint have the same name when it is flattened: {name!r}.")
        found[name] = path, value
    return found


def paths_of(flat: Mapping[str, tuple[Keys, Any]]) -> dict[str, Keys]:
    """Return the paths of a flattened state by name."""
    return {key: keys for key, (keys, _) in flat.items()}


def _leaves(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        other = next((key for key in value if not isinstance(key, str)), None)
        if other is not None:
            yield path, _as_one_value(path, value, f"a dict with the key {other!r}, of type {type(other).__name__}")
            return
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list) and _has_entries(value):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)
    elif isinstance(value, tuple):
        yield path, _as_one_value(path, value, "a tuple")
    else:
        yield path, value


def _as_one_value(path: Keys, value: Any, what: str) -> Any:
    """Return plain containers, as ``weights_only`` unpickling needs; raise if they hold shards."""
    if isinstance(value, CheckpointShard):
        name = ".".join(map(str, path))
        raise ValueError(
            f"In the checkpoint, {name or 'what is saved'!r} is {what}, and holds sharded values. Sharded checkpoints "
            "name these by strings: put them into dicts whose keys are strings, or into lists."
        )
    if isinstance(value, Mapping):
        return {key: _as_one_value(path, inner, what) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_one_value(path, inner, what) for inner in value)
    return value


def _has_entries(value: list[Any]) -> bool:
    return any(isinstance(x, Mapping | Tensor) or (isinstance(x, list) and _has_entries(x)) for x in value)


class _Branch(dict[Any, Any]):
    """Entries of a dict, or of a list by their numbers."""

    def __init__(self, is_list: bool) -> None:
        super().__init__()
        self.is_list = is_list


def is_path(value: Any) -> bool:
    """Return True if ``value`` is a tuple of keys that :func:`nest_state` can follow."""
    return (
        isinstance(value, tuple)
        and 0 < len(value) <= MAX_LEVELS
        and all(type(key) in (str, int) for key in value)
        and isinstance(value[0], str)
    )


def nest_state(entries: Mapping[Keys, Any]) -> dict[str, Any]:
    """Return the nested state of values by path, the inverse of :func:`flatten_state`."""
    root = _Branch(is_list=False)
    for path, value in entries.items():
        branch = root
        for key, following in zip(path, path[1:], strict=False):
            branch = _step(branch, key, isinstance(following, int), path)
        _check_kind(branch, path[-1], path)
        if path[-1] in branch:
            raise ValueError(f"two entries stand at {short(path)}")
        branch[path[-1]] = value
    return {key: _joined(value, (key,)) for key, value in root.items()}


def _step(branch: _Branch, key: str | int, to_list: bool, path: Keys) -> _Branch:
    _check_kind(branch, key, path)
    below = branch.setdefault(key, _Branch(to_list))
    if not isinstance(below, _Branch):
        raise ValueError(f"{short(path)} stands below another entry")
    return below


def _check_kind(branch: _Branch, key: str | int, path: Keys) -> None:
    if branch.is_list != isinstance(key, int):
        raise ValueError(f"{short(path)} stands in a {'list' if branch.is_list else 'dict'} with the key {short(key)}")


def _joined(value: Any, path: Keys) -> Any:
    if not isinstance(value, _Branch):
        return value
    found = {key: _joined(inner, (*path, key)) for key, inner in value.items()}
    if not value.is_list:
        return found
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None:
        others = next(key for key in found if not 0 <= key < len(found))
        raise ValueError(f"the list at {short(path)} has an entry {others}, and none {missing}")
    return [found[number] for number in range(len(found))]
