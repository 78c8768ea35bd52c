"""A torch reads metadata that another one of the supported torches has written."""

import copyreg
import io
import pickle
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.metadata import CLASSES, build_metadata, dump_metadata, read_metadata
from lightning_zero.checkpoint.sharded.planner import StoredItem

# The fields of torch 2.11, which has no others: it fails on a pickle that sets more.
OLDEST = {
    "Metadata": {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    "MetadataIndex": {"fqn", "offset", "index"},
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "BytesStorageMetadata": set(),
    "StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
    "_StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
}
OLDEST_PROPERTIES = 5


def metadata() -> Metadata:
    items = [
        StoredItem(("a.weight",), "__0_0.distcp", 0, 64, torch.Size((2, 3)), torch.float32, Box((0, 0), (2, 3))),
        StoredItem(("seed",), "__0_0.distcp", 64, 8),
    ]
    return build_metadata(items, {"a.weight": ("a.weight",), "seed": ("seed",)}, "lightning_zero-1")


def states(data: bytes) -> dict[str, list[Any]]:
    """Return the states that a pickle gives to objects of DCP's classes."""
    found: dict[str, list[Any]] = defaultdict(list)

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in CLASSES:
                return super().find_class(module, name)
            return type(name, (), {"__setstate__": lambda self, state: found[name].append(state)})

    Reader(io.BytesIO(data)).load()
    return found


def test_the_oldest_torch_can_read_what_this_one_writes() -> None:
    found = states(dump_metadata(metadata()))
    assert {len(state) for state in found.pop("TensorProperties")} == {OLDEST_PROPERTIES}
    for name, written in found.items():
        for state in written:
            assert state.keys() <= OLDEST[name], f"torch 2.11 has no such field of {name}"


def test_what_a_newer_torch_writes_about_a_tensor_is_read() -> None:
    class Newer(pickle.Pickler):
        dispatch_table = {
            **copyreg.dispatch_table,
            TensorProperties: lambda one: (
                copyreg.__newobj__,  # type: ignore[attr-defined]
                (TensorProperties,),
                (*one.__getstate__()[:OLDEST_PROPERTIES], (3, 1), "of torch 2.16"),
            ),
        }

    file = io.BytesIO()
    Newer(file).dump(metadata())
    assert read_metadata(io.BytesIO(file.getvalue()), "x") == metadata()
