"""Tensors that share memory with a parameter and were taken before it was sharded (``weight.data``, a row of it).

In a plain module a write to such a tensor changes the parameter. After sharding, the parameter has other memory. A
tensor of all elements becomes another name of the shard, and follows the same rules; any other one raises when it is
used, with the parameter's name.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.compat.tensors import FakeTensor
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import is_strided
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.tensor_extent import extent
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["Aliases", "check_shared_memory"]


class _Range:
    """Bytes of a storage that a tensor's elements span."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()._cdata
        self.begin = tensor.storage_offset() * tensor.element_size()
        self.end = self.begin + extent(tensor.size(), tensor.stride()) * tensor.element_size()

    def overlaps(self, other: _Range) -> bool:
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0 and not isinstance(tensor, FakeTensor)


def check_shared_memory(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError for parameters, or a parameter and a buffer, that are two objects in the same memory.

    Args:
        params: by name, each object once.
        buffers: by name.
    """
    by_storage: dict[int, list[tuple[str, _Range]]] = {}
    with no_shard_dispatch():
        for name, param in params.items():
            if _has_memory(param):
                span = _Range(param)
                for other, theirs in by_storage.setdefault(span.storage, []):
                    if span.overlaps(theirs):
                        raise UnsupportedError(
                            f"Parameters {other!r} and {name!r} are two objects in the same memory. Sharded, each "
                            "would have values of its own. Tie them as one object: `module.weight = other.weight`, in "
                            "__init__() or configure_model()."
                        )
                by_storage[span.storage].append((name, span))
        for name, buffer in buffers.items():
            if type(buffer) is Tensor and is_strided(buffer) and _has_memory(buffer):
                span = _Range(buffer)
                for other, theirs in by_storage.get(span.storage, ()):
                    if span.overlaps(theirs):
                        raise UnsupportedError(
                            f"Buffer {name!r} shares memory with parameter {other!r}, which would have other memory "
                            "once it is sharded. Register a copy (`tensor.clone()`), or read the parameter instead."
                        )


class StaleAlias(Tensor):
    """Part of a parameter's memory before it was sharded. Each use raises an error with the parameter's name."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__hash__", "__dir__"):
            with no_shard_dispatch():
                return func(*args, **(kwargs or {}))
        own = next(a.__dict__["_zero_name"] for a in _tensors([*args, *(kwargs or {}).values()]))
        key = own.rpartition(".")[2]
        raise UnsupportedError(
            f"A tensor that was taken of the memory of {own!r} before the model was sharded was used ({name}). The "
            "parameter has other memory now, so a write would be lost, and a read would give old values. Read "
            f"`module.{key}` when you need it, and write to that, on every rank."
        )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _tensors(value)
        elif type(value) is StaleAlias:
            yield value


class Aliases:
    """Finds these tensors when all parameters are sharded."""

    def __init__(self) -> None:
        self._cut: list[tuple[StorageWeakRef, _Range, ShardedParameter, tuple[Any, ...]]] = []

    def note(self, param: Tensor) -> Any:
        """Return what :meth:`cut` needs to know of a parameter's memory; before that is replaced."""
        with no_shard_dispatch():
            if not _has_memory(param):
                return None
            return StorageWeakRef(param.untyped_storage()), _Range(param), _looks(param)

    def cut(self, noted: Any, record: ShardedParameter) -> None:
        """Remember that the parameter of this record had that memory."""
        if noted is not None:
            storage, span, looks = noted
            self._cut.append((storage, span, record, looks))

    def resolve(self) -> None:
        """Turn the tensors that still hold a sharded parameter's former memory into shards, or into stale ones."""
        held = [entry for entry in self._cut if not entry[0].expired()]
        self._cut.clear()
        if not held:
            return
        by_storage: dict[int, list[tuple[_Range, ShardedParameter, tuple[Any, ...]]]] = {}
        for storage, span, record, looks in held:
            by_storage.setdefault(storage.cdata, []).append((span, record, looks))
        with no_shard_dispatch():
            for tensor in _living_tensors():
                self._resolve(tensor, by_storage)

    @staticmethod
    def _resolve(
        tensor: Tensor, by_storage: Mapping[int, list[tuple[_Range, ShardedParameter, tuple[Any, ...]]]]
    ) -> None:
        try:
            span = _Range(tensor) if _has_memory(tensor) else None
        except (RuntimeError, NotImplementedError):  # a tensor without a storage
            return
        for theirs, record, looks in by_storage.get(span.storage, ()) if span is not None else ():
            if span is None or not span.overlaps(theirs):
                continue
            if _looks(tensor) == looks and type(tensor) in (Tensor, nn.Parameter):
                # numpy arrays of this tensor's memory do not hold the storage themselves.
                tensor.__dict__["_zero_former_memory"] = tensor.detach()
                record.add_alias(tensor)
            elif type(tensor) is Tensor:
                tensor.__class__ = StaleAlias  # type: ignore[assignment]
                tensor.__dict__["_zero_name"] = record.name
            return


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _living_tensors() -> list[Tensor]:
    return [cast(Tensor, found) for found in gc.get_objects() if issubclass(type(found), Tensor)]
