"""Read and build ``.metadata`` of DCP: the tensors, and the file and position of each chunk.

The file is a pickle of torch's classes, which other readers expect. :class:`_MetadataUnpickler` reads it. A file can
make plain containers, call the listed functions, and make instances of the listed classes. State is set once on such an
instance, and only its fields. Nothing else in the process changes, and nothing larger than the file is allocated.

Kept although torch has ``weights_only`` unpickling: it does not read pickle protocol 4, in which DCP writes this file.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
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

from lightning_zero.checkpoint.sharded.boxes import Box, tiling_error
from lightning_zero.checkpoint.sharded.planner import Keys, StoredItem, is_path, nest_state
from lightning_zero.compat.distributed import MemoryFormat, StorageInfo, get_layout
from lightning_zero.errors import CheckpointError

METADATA = ".metadata"
OBJECTS_FILE = "meta.pt"  # the values without shards, as Lightning's sharded strategies name it
SAVE_ID_PREFIX = "lightning_zero-"  # a checkpoint with such a save id must have a manifest
VERSION = "1.0.0"  # of DCP's format
PROPERTIES = 5  # values that describe a tensor; torch 2.15 adds its strides, which no reader needs
MAX_DIMS = 64  # of a tensor: torch's kernels support no more
MAX_BYTES = 1 << 63  # of a tensor or a file: sizes and positions have 64 bits


def build_metadata(items: Iterable[StoredItem], paths: Mapping[str, Keys], save_id: str) -> Metadata:
    """Return the metadata that DCP would write."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for item in items:
        for key in item.keys:
            info = StorageInfo(item.file, item.offset, item.length)
            if item.box is None or item.shape is None or item.dtype is None:
                described[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = info
                continue
            tensor = described.setdefault(
                key, TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.shape), [])
            )
            chunk = ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes))
            places[MetadataIndex(key, chunk.offsets, len(tensor.chunks))] = info
            tensor.chunks.append(chunk)
    in_order = {key: described[key] for key in paths}  # in the order of the state dict
    return Metadata(in_order, dict(paths), places, StorageMeta(save_id=save_id), VERSION)


def dump_metadata(metadata: Metadata) -> bytes:
    """Pickle metadata in the form of the oldest supported torch, which every later one reads."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return file.getvalue()


def _reduce_properties(properties: Any) -> tuple[Any, ...]:
    new: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # pickle writes its own instruction for it
    return new, (TensorProperties,), properties.__getstate__()[:PROPERTIES]


# -- unpickling


def _dtype(module: str, name: str) -> Any:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def _size(numbers: Any = ()) -> torch.Size:
    if not _is_sizes(numbers):
        raise pickle.UnpicklingError(f"it makes a torch.Size of {short(numbers)}")
    return torch.Size(numbers)


def _ordered_dict(*arguments: Any) -> Any:
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
    made.__setstate__(state[:PROPERTIES])  # torch before 2.15 takes no more
    return vars(made)


def _index(state: Any) -> Mapping[str, Any]:
    # An index is hashed as a key, so its fields must be hashable.
    allowed = {"fqn": (str,), "offset": (torch.Size, type(None)), "index": (int, type(None))}
    if type(state) is not dict or not all(type(state[key]) in allowed.get(key, ()) for key in state):
        raise pickle.UnpicklingError(f"the place of a part is {short(state)}")
    return state


def _by_name(*values: Any) -> dict[tuple[str, str], Any]:
    return {(one.__module__, one.__qualname__): one for one in values}


CLASSES: dict[tuple[str, str], Any] = _by_name(
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # its name in Python 3.13
    ("torch", "Size"): _size,
    (MemoryFormat.__module__, MemoryFormat.__qualname__): _memory_format,
    (get_layout.__module__, get_layout.__qualname__): _layout,
}
# Functions from a pickled state to fields, for classes with another state than a dict of fields.
STATES: dict[type, Callable[[Any], Mapping[str, Any]]] = {TensorProperties: _properties, MetadataIndex: _index}
FIELDS = {cls: {field.name for field in fields(cls)} for cls in CLASSES.values()}
HASHABLE = (str, int, *(cls for cls in CLASSES.values() if cls.__hash__ not in (None, object.__hash__)))


class _Name:
    """A class or function that a file names. The unpickler never has the real one on its stack."""

    __slots__ = ("name",)

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it has an instruction {bytes([code])!r}, which metadata never have")


_PythonUnpickler: Any = pickle._Unpickler  # the C implementation's steps cannot be replaced


class _MetadataUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Python's unpickler with the harmless instructions only, and checks in those that use names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._blank: dict[int, Any] = {}  # instances without a state, by id; kept alive so that ids stay unique

    def find_class(self, module: str, name: str) -> Any:
        found = _dtype(module, name)
        if found is not None:
            return found
        if (module, name) not in CLASSES and (module, name) not in FUNCTIONS:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}")
        return _Name((module, name))

    def load_reduce(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        function = FUNCTIONS.get(callee.name) if type(callee) is _Name else None
        if function is None or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"it calls a {type(callee).__name__}")
        self.append(function(*arguments))

    def load_newobj(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        cls = CLASSES.get(callee.name) if type(callee) is _Name else None
        if cls is None or arguments != ():
            raise pickle.UnpicklingError(f"it makes an object of a {type(callee).__name__}")
        made = object.__new__(cls)
        self._blank[id(made)] = made
        self.append(made)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        cls = type(target)
        if self._blank.pop(id(target), None) is None:
            raise pickle.UnpicklingError(f"it changes a {cls.__name__}")
        values = STATES[cls](state) if cls in STATES else state
        if type(values) is not dict:
            raise pickle.UnpicklingError(f"the state of a {cls.__name__} is {short(values)}")
        if not values.keys() <= FIELDS[cls]:
            other = next(name for name in values if name not in FIELDS[cls])
            raise pickle.UnpicklingError(f"it sets {short(other)} of a {cls.__name__}, which has no such field")
        vars(target).update(values)

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        found = self.stack[-1]
        if type(found) is not list:
            raise pickle.UnpicklingError(f"it appends to a {type(found).__name__}")
        found.extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        found = self.stack[-1]
        if not isinstance(found, dict) or len(items) % 2:
            raise pickle.UnpicklingError(f"it sets entries of a {type(found).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in HASHABLE or id(key) in self._blank:
                raise pickle.UnpicklingError(f"a {type(key).__name__} is a key")
            if key in found:
                raise pickle.UnpicklingError(f"the key {short(key)} is there twice")
            found[key] = value

    dispatch = _Opcodes(
        {
            code: _PythonUnpickler.dispatch[code]
            for code in b"".join(
                (
                    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.GLOBAL, pickle.STACK_GLOBAL),
                    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
                    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
                    *(pickle.BININT1, pickle.BININT2, pickle.BININT, pickle.LONG1),
                    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
                    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
                    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT),
                )
            )
        }
    )
    for _code, _step in (
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_newobj),
        (pickle.BUILD, load_build),
        (pickle.APPEND, load_append),
        (pickle.APPENDS, load_appends),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
    ):
        dispatch[_code[0]] = _step


def load_restricted(data: bytes) -> Any:
    """Unpickle plain containers and instances of DCP's metadata classes.

    Raises:
        Exception: the pickle is damaged, names something else, or does something else than to make objects.
    """
    file = io.BytesIO(data)
    unpickler = _MetadataUnpickler(file)
    found = unpickler.load()
    if file.tell() != len(data) or unpickler.stack or unpickler.metastack:
        raise pickle.UnpicklingError("it ends too early, or more follows its end")
    return found


def read_metadata(file: BinaryIO, path: str) -> Metadata:
    """Read metadata, and check that they describe a complete checkpoint.

    Raises:
        CheckpointError: it is damaged, contradicts itself, or names other classes.
    """
    try:
        found = load_restricted(file.read())
    except Exception as error:  # damage may show as anything
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. It is damaged, or not the metadata of a "
            "distributed checkpoint of torch."
        ) from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} is not the metadata of a distributed checkpoint of torch.")
    try:
        problem = next(_problems(found), None)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"is damaged: {type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} {problem}. Use another checkpoint.")
    return found


def _problems(found: Metadata) -> Iterator[str]:
    """Yield contradictions, as the ends of sentences.

    Checkpoints of other programs have no checksum that would detect them. If chunks did not cover a tensor, its reader
    would return uninitialized memory.
    """
    paths, meta = found.planner_data or {}, found.storage_meta
    if meta is not None and not (isinstance(meta, StorageMeta) and isinstance(meta.save_id, str | None)):
        yield "is damaged: it does not say of which save it is"
    if not all(map(is_path, paths.values())):
        yield "is damaged: an entry has no path of keys"
    seen: set[MetadataIndex] = set()
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            yield f"is damaged: it does not say what {short(key)} is"
        elif paths and key not in paths:
            yield f"is damaged: it does not say where {key!r} stands"
        indices = [MetadataIndex(key)]
        least = [0]
        if isinstance(entry, TensorStorageMetadata):
            yield from _tensor_problems(key, entry)
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
    places = {tuple(paths.get(key, (key,))): None for key in found.state_dict_metadata}
    if len(places) < len(found.state_dict_metadata):
        yield "is damaged: two entries stand at one place"
    nest_state(places)  # raises ValueError


def _tensor_problems(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    shape, chunks, dtype = entry.size, entry.chunks, entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not _is_sizes(shape) or not isinstance(chunks, list):
        yield f"is damaged: it does not say what {key!r} is"
    if len(shape) > MAX_DIMS or prod(size for size in shape if size) * dtype.itemsize >= MAX_BYTES:
        yield f"is damaged: {key!r} has the shape {short(list(shape))}"
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not _is_within(chunk.offsets, chunk.sizes, shape):
            yield f"is damaged: a part of {key!r} is not within it"
    problem = tiling_error(shape, [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])
    if problem is not None:
        yield f"is damaged: the parts of {key!r} {problem}"


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    return all(type(one) is int and 0 <= one < MAX_BYTES for one in value)


def _is_within(offsets: Any, sizes: Any, shape: Sequence[int]) -> bool:
    return (
        _is_sizes(offsets)
        and _is_sizes(sizes)
        and len(offsets) == len(sizes) == len(shape)
        and all(begin + count <= size for begin, count, size in zip(offsets, sizes, shape, strict=True))
    )


def _is_file_name(name: Any) -> bool:
    return type(name) is str and name not in ("", ".", "..") and not any(char in name for char in "/\0")
