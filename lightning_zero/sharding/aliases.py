"""Find tensors that were taken of a parameter's memory before it was sharded (``weight.data``, a row).

In a plain module a write to such a tensor changes the parameter. After sharding, the parameter has other memory. A
tensor of all elements becomes an alias of the shard and follows the same rules. Any other one raises on use, with the
parameter's name.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.compat.tensors import FakeTensor, storage_key
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import extent, is_strided
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch


class StorageSpan:
    """Hold the byte range of a storage that a tensor's elements span."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = storage_key(tensor)
        self.begin = tensor.storage_offset() * tensor.element_size()
        self.end = self.begin + extent(tensor.size(), tensor.stride()) * tensor.element_size()

    def overlaps(self, other: StorageSpan) -> bool:
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0 and not isinstance(tensor, FakeTensor)


def check_shared_memory(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError if a parameter shares memory with another parameter object or a buffer."""
    by_storage: dict[int, list[tuple[str, StorageSpan]]] = {}
    with no_shard_dispatch():
        for name, param in params.items():
            if _has_memory(param):
                span = StorageSpan(param)
                for other, other_span in by_storage.setdefault(span.storage, []):
                    if span.overlaps(other_span):
                        raise UnsupportedError(
                            f"Parameters {other!r} and {name!r} are two objects in the same memory. Once "
                            "sharded, each would have its own values. Tie them as one object: "
                            "`module.weight = other.weight`, in __init__() or configure_model()."
                        )
                by_storage[span.storage].append((name, span))
        for name, buffer in buffers.items():
            if type(buffer) is Tensor and is_strided(buffer) and _has_memory(buffer):
                span = StorageSpan(buffer)
                for other, other_span in by_storage.get(span.storage, ()):
                    if span.overlaps(other_span):
                        raise UnsupportedError(
                            f"Buffer {name!r} shares memory with parameter {other!r}, which would have other memory "
                            "once it is sharded. Register a copy (`tensor.clone()`), or read the parameter instead."
                        )


class StaleAlias(Tensor):
    """Represent part of a parameter's former memory. Each use raises, with the parameter's name."""

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
    """Collect the former memory of parameters, and find the tensors in it after sharding."""

    def __init__(self) -> None:
        self._registered: list[tuple[StorageWeakRef, StorageSpan, ShardedParameter, tuple[Any, ...]]] = []

    def snapshot_memory(self, param: Tensor) -> Any:
        """Return a parameter's memory for :meth:`register`. Call it before that memory is replaced."""
        with no_shard_dispatch():
            if not _has_memory(param):
                return None
            return StorageWeakRef(param.untyped_storage()), StorageSpan(param), _view_key(param)

    def register(self, noted: Any, record: ShardedParameter) -> None:
        """Remember that the parameter of this record had the memory of this snapshot."""
        if noted is not None:
            storage, span, view_key = noted
            self._registered.append((storage, span, record, view_key))

    def resolve(self) -> None:
        """Turn tensors that still hold former memory of a parameter into shards or stale aliases."""
        alive = [entry for entry in self._registered if not entry[0].expired()]
        self._registered.clear()
        if not alive:
            return
        by_storage: dict[int, list[tuple[StorageSpan, ShardedParameter, tuple[Any, ...]]]] = {}
        for storage, span, record, view_key in alive:
            by_storage.setdefault(storage.cdata, []).append((span, record, view_key))
        with no_shard_dispatch():
            for tensor in _living_tensors():
                self._resolve(tensor, by_storage)

    @staticmethod
    def _resolve(
        tensor: Tensor, by_storage: Mapping[int, list[tuple[StorageSpan, ShardedParameter, tuple[Any, ...]]]]
    ) -> None:
        try:
            span = StorageSpan(tensor) if _has_memory(tensor) else None
        except (RuntimeError, NotImplementedError):  # a tensor without a storage
            return
        for other_span, record, view_key in by_storage.get(span.storage, ()) if span is not None else ():
            if span is None or not span.overlaps(other_span):
                continue
            if record.format is None and _view_key(tensor) == view_key and type(tensor) in (Tensor, nn.Parameter):
                # numpy arrays of this tensor's memory do not hold the storage themselves.
                tensor.__dict__["_zero_former_memory"] = tensor.detach()
                record.add_alias(tensor)
            elif type(tensor) is Tensor:
                tensor.__class__ = StaleAlias  # type: ignore[assignment]
                tensor.__dict__["_zero_name"] = record.name
            return


def _view_key(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _living_tensors() -> list[Tensor]:
    return [cast(Tensor, found) for found in gc.get_objects() if issubclass(type(found), Tensor)]
