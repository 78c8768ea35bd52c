"""``.metadata`` of torch's distributed checkpoints: the tensors, and the file in which each box of one is stored.

The file is a pickle. We write torch's own classes, since other readers expect them. To read, :mod:`.unpickling` makes
instances of these classes alone, and changes nothing else in the process.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import PosixPath
from reprlib import repr as short
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.covering import uncovered
from lightning_zero.checkpoint.sharded.paths import Keys, is_path, nested
from lightning_zero.checkpoint.sharded.unpickling import Known, unpickled
from lightning_zero.checkpoint.sharded.writing import Written
from lightning_zero.compat.distributed import MemoryFormat, StorageInfo, get_layout
from lightning_zero.errors import CheckpointError

__all__ = ["METADATA", "build_metadata", "read_metadata"]

METADATA = ".metadata"
VERSION = "1.0.0"  # of torch's format
MOST_DIMS = 64  # of a tensor: torch's own kernels take no more
MOST_BYTES = 1 << 63  # of a tensor or a file: sizes and positions are of 64 bits


def build_metadata(placed: Iterable[Written], paths: Mapping[str, Keys], save_id: str) -> Metadata:
    """As torch's own saving would make it.

    Args:
        placed: all ranks'.
        paths: of every key, where it stood before nested state was flattened.
        save_id: of this save.
    """
    described: dict[str, Any] = {}
    lies: dict[MetadataIndex, Any] = {}
    for item in placed:
        for key in item.keys:
            where = StorageInfo(item.file, item.offset, item.length)
            if item.box is None or item.shape is None or item.dtype is None:
                described[key] = BytesStorageMetadata()
                lies[MetadataIndex(key)] = where
                continue
            found = described.setdefault(
                key, TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.shape), [])
            )
            box = ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes))
            lies[MetadataIndex(key, box.offsets, len(found.chunks))] = where
            found.chunks.append(box)
    in_order = {key: described[key] for key in paths}  # that of the state dict, on whichever rank a thing was written
    return Metadata(in_order, dict(paths), lies, StorageMeta(save_id=save_id), VERSION)


# -- reading


def _dtype(module: str, name: str) -> Any:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def _size(numbers: Any = ()) -> torch.Size:
    if not _is_sizes(numbers):
        raise pickle.UnpicklingError(f"it makes a torch.Size of {short(numbers)}")
    return torch.Size(numbers)


def _ordered(*arguments: Any) -> Any:
    if arguments:
        raise pickle.UnpicklingError("it makes an OrderedDict of something")
    return OrderedDict()


def _path(*parts: Any) -> PosixPath:
    if not all(type(part) is str for part in parts):
        raise pickle.UnpicklingError(f"it makes a path of {short(parts)}")
    return PosixPath(*parts)


def _memory_format(number: Any) -> Any:
    return MemoryFormat(number if type(number) is int else None)


def _layout(name: Any) -> Any:
    if type(name) is not str or not name.startswith("torch."):
        raise pickle.UnpicklingError(f"{short(name)} is no layout")
    return get_layout(name)


def _properties(state: Any) -> Mapping[str, Any]:
    made = TensorProperties()
    if type(state) is not tuple or not isinstance(state[0], torch.dtype):
        raise pickle.UnpicklingError(f"the properties of a tensor are {short(state)}")
    made.__setstate__(state)
    return vars(made)


def _index(state: Any) -> Mapping[str, Any]:
    """Check the fields of what is hashed as a key."""
    allowed = {"fqn": (str,), "offset": (torch.Size, type(None)), "index": (int, type(None))}
    if type(state) is not dict or not all(type(state[key]) in allowed.get(key, ()) for key in state):
        raise pickle.UnpicklingError(f"the place of a part is {short(state)}")
    return state


def _named(*known: Any) -> dict[tuple[str, str], Any]:
    return {(one.__module__, one.__qualname__): one for one in known}


CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
FUNCTIONS = {
    ("collections", "OrderedDict"): _ordered,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # as Python 3.13 names it
    ("torch", "Size"): _size,
    (MemoryFormat.__module__, MemoryFormat.__qualname__): _memory_format,
    (get_layout.__module__, get_layout.__qualname__): _layout,
}
KNOWN = Known(_named(*CLASSES), FUNCTIONS, {TensorProperties: _properties, MetadataIndex: _index}, _dtype)


def read_metadata(file: BinaryIO, where: str) -> Metadata:
    """Return the contents of a file that describe a whole checkpoint.

    Args:
        file: open for reading.
        where: its path, for errors.

    Raises:
        CheckpointError: it is damaged, contradicts itself, or names what is no metadata.
    """
    try:
        found = unpickled(file.read(), KNOWN)
    except Exception as error:  # damage may show as anything
        raise CheckpointError(
            f"{where} cannot be read: {type(error).__name__}: {error}. It is damaged, or not the metadata of a "
            "distributed checkpoint of torch."
        ) from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{where} is not the metadata of a distributed checkpoint of torch.")
    try:
        wrong = next(_wrongs(found), None)
    except (AttributeError, TypeError, ValueError) as error:
        wrong = f"is damaged: {type(error).__name__}: {error}"
    if wrong is not None:
        raise CheckpointError(f"{where} {wrong}. Use another checkpoint.")
    return found


def _wrongs(found: Metadata) -> Iterator[str]:
    """Yield what no saving would write, as the ends of sentences. Others' checkpoints have no checksum that would
    notice; and if boxes do not cover a tensor, its reader gets uninitialized memory."""
    paths, meta = found.planner_data or {}, found.storage_meta
    if not isinstance(paths, dict) or not all(isinstance(x, dict) for x in (found.state_dict_metadata, paths)):
        yield "is damaged: it has no table of entries"
    if not isinstance(found.storage_data, dict):
        yield "is not the metadata of a distributed checkpoint of torch: it has no table of places"
    if meta is not None and not (isinstance(meta, StorageMeta) and isinstance(meta.save_id, str | None)):
        yield "is damaged: it does not say of which save it is"
    for path in paths.values():
        if not is_path(path):
            yield f"is damaged: {short(path)} is no way to an entry"
    seen: set[MetadataIndex] = set()
    lists: set[int] = set()
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            yield f"is damaged: it does not say what {short(key)} is"
        elif paths and key not in paths:
            yield f"is damaged: it does not say where {key!r} stands"
        indices = [MetadataIndex(key)]
        least = [0]
        if isinstance(entry, TensorStorageMetadata):
            yield from _wrongs_of_tensor(key, entry)
            if id(entry.chunks) in lists:
                yield f"is damaged: the parts of {key!r} are another entry's, too"
            lists.add(id(entry.chunks))
            indices = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
            strided = entry.properties.layout is torch.strided
            least = [prod(chunk.sizes) * entry.properties.dtype.itemsize * strided for chunk in entry.chunks]
        for index, count in zip(indices, least, strict=True):
            info = found.storage_data.get(index)
            if not isinstance(info, StorageInfo):
                yield f"does not say in which file {key!r} lies"
            elif not _is_file_name(info.relative_path):
                yield f"does not say in which file {key!r} lies: {short(info.relative_path)} is none of its folder's"
            elif not _is_sizes((info.offset, info.length)) or info.length < count:
                yield f"is damaged: {key!r} lies at {short(info.offset)} in {short(info.length)} bytes"
        seen.update(indices)
    for index in found.storage_data:
        if index not in seen:
            yield f"is damaged: it says where a part of {short(getattr(index, 'fqn', index))} lies that is not there"
    try:
        nested({tuple(paths.get(key, (key,))): None for key in _each_once(found.state_dict_metadata, paths)})
    except ValueError as error:
        yield f"is damaged: {error}"


def _each_once(keys: Iterable[str], paths: Mapping[str, Keys]) -> Iterator[str]:
    seen: dict[Keys, str] = {}
    for key in keys:
        other = seen.setdefault(paths.get(key, (key,)), key)
        if other != key:
            raise ValueError(f"{other!r} and {key!r} stand at one place, {short(paths.get(key))}")
        yield key


def _wrongs_of_tensor(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    shape, chunks, dtype = entry.size, entry.chunks, entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not _is_sizes(shape) or not isinstance(chunks, list):
        yield f"is damaged: it does not say what {key!r} is"
    if len(shape) > MOST_DIMS or _is_large(shape, dtype):
        yield f"is damaged: {key!r} has the shape {short(list(shape))}"
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not _is_within(chunk.offsets, chunk.sizes, shape):
            yield f"is damaged: a part of {key!r} is not within it"
    wrong = uncovered(shape, [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])
    if wrong is not None:
        yield f"is damaged: the parts of {key!r} {wrong}"


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    return all(type(one) is int and 0 <= one < MOST_BYTES for one in value)


def _is_large(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return prod(size for size in shape if size) * dtype.itemsize >= MOST_BYTES


def _is_within(offsets: Any, sizes: Any, shape: Sequence[int]) -> bool:
    return (
        _is_sizes(offsets)
        and _is_sizes(sizes)
        and len(offsets) == len(sizes) == len(shape)
        and all(begin + count <= size for begin, count, size in zip(offsets, sizes, shape, strict=True))
    )


def _is_file_name(name: Any) -> bool:
    return type(name) is str and name not in ("", ".", "..") and not any(char in name for char in "/\0")
