"""``.metadata`` of torch's distributed checkpoints: which tensors there are, and in which file each box of one lies.

It is a pickle. We write torch's own classes, since other readers want them, and read no others: unpickling calls
whatever the file names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import PosixPath
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

from lightning_zero.checkpoint.sharded.writing import Written
from lightning_zero.compat.distributed import MemoryFormat, StorageInfo, get_layout
from lightning_zero.errors import CheckpointError

__all__ = ["METADATA", "Keys", "metadata_of", "read_metadata"]

METADATA = ".metadata"
VERSION = "1.0.0"  # of torch's format

Keys = tuple[str | int, ...]  # the keys of nested dicts and lists on the way to a value

ALLOWED = {
    (known.__module__, known.__qualname__)
    for known in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MemoryFormat,
        Metadata,
        MetadataIndex,
        OrderedDict,
        PosixPath,
        StorageInfo,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        get_layout,
        torch.Size,
    )
}


def metadata_of(placed: Iterable[Written], paths: Mapping[str, Keys], save_id: str) -> Metadata:
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_metadata(file: BinaryIO, where: str) -> Metadata:
    """What a file says.

    Args:
        file: open for reading.
        where: its path, for errors.

    Raises:
        CheckpointError: it is damaged, or would run code.
    """
    try:
        found = _Unpickler(io.BytesIO(file.read())).load()
    except Exception as error:  # damage may show as anything
        raise CheckpointError(
            f"{where} cannot be read: {type(error).__name__}: {error}. It is damaged, or not the metadata of a "
            "distributed checkpoint of torch."
        ) from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{where} is not the metadata of a distributed checkpoint of torch.")
    try:
        wrong = next(_wrongs(found), None)
    except (AttributeError, TypeError, ValueError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        raise CheckpointError(f"{where} is damaged: {wrong}. Use another checkpoint.")
    return found


def _wrongs(found: Metadata) -> Iterator[str]:
    """What no saving would say. A checkpoint of others has no checksum that would notice; and where boxes do not fill
    a tensor, whoever reads it gets what happened to be in memory."""
    for path in (found.planner_data or {}).values():
        if not isinstance(path, tuple) or not path or not all(isinstance(key, str | int) for key in path):
            yield f"{path!r} is no way to an entry"
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            yield f"it does not say what {key!r} is"
        elif isinstance(entry, TensorStorageMetadata):
            within = (
                min((*chunk.offsets, *chunk.sizes), default=0) >= 0
                and all(a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
                for chunk in entry.chunks
            )
            if not isinstance(entry.properties.dtype, torch.dtype) or not all(within):
                yield f"a part of {key!r} is not within it"
            elif sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
                yield f"the parts of {key!r} do not make a whole"
    for index, info in found.storage_data.items():
        numbers = (info.offset, info.length)
        if not isinstance(info.relative_path, str) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            yield f"it does not say where {index.fqn!r} lies"
