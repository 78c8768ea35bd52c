"""Values of a sharded module's ``state_dict()``: writing to one writes to the parameter, as in a plain module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder

__all__ = ["StateDictTensor"]

_IN_PLACE = frozenset(
    ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__"]
)


class StateDictTensor(Tensor):
    """A full value, or a view of one. Results computed from it are plain tensors."""

    _zero_full: Tensor
    _zero_write: Callable[[Tensor], None]

    @staticmethod
    def of(full: Tensor, record: ShardedParameter, sharder: Sharder) -> Tensor:
        """Return ``full`` as the current value of a parameter."""
        return _view(full, full, _Writer(record, sharder))

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = next(_values(args), None)
        if name == "__set__" and first is args[0] and func.__self__.__name__ == "data":
            first.__class__ = Tensor  # `value.data = x` gives a detached tensor other memory, and the parameter nothing
            first.__dict__.clear()
            first.data = _plain(args[1])
            return None
        plain, named = [_plain(arg) for arg in args], {key: _plain(arg) for key, arg in (kwargs or {}).items()}
        result = func(*plain, **named)
        written = [*_values([(kwargs or {}).get("out")])]
        if name in _IN_PLACE or name == "__setitem__" or name.endswith("_") and not name.endswith("__"):
            written += _values(args[:1])
        for value in written:
            value._zero_write(value._zero_full)
        if len(written) == 1 and result is not None:
            return written[0]
        if first is not None and type(result) is Tensor and _shares(result, first._zero_full):
            return _view(result, first._zero_full, first._zero_write)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self.as_subclass(Tensor).clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _Writer:
    """Writes a full value to the shards of the parameter that it was read from."""

    def __init__(self, record: ShardedParameter, sharder: Sharder) -> None:
        self._record, self._sharder = record, weakref.ref(sharder)
        self._version = record.param._version

    def __call__(self, full: Tensor) -> None:
        sharder, record = self._sharder(), self._record
        if sharder is None:
            return
        if record.param._version != self._version:
            raise UnsupportedError(
                f"The value of {record.name!r} in a state_dict() was written to after the parameter had changed, as by "
                "an optimizer step. In a plain module the two share memory; here the write cannot reach the parameter "
                "any more. To change the parameter, call state_dict() again; to keep values of your own, take "
                "`value.clone()`."
            )
        sharder.sync.before_overwriting()
        with torch.no_grad():
            record.param.copy_(full)
        self._version = record.param._version


def _view(tensor: Tensor, full: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    view = cast(StateDictTensor, tensor.as_subclass(StateDictTensor))
    view.__dict__.update(_zero_full=full, _zero_write=write)
    return view


def _shares(tensor: Tensor, full: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device == full.device
        and tensor.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    )


def _values(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _values(arg)
        elif isinstance(arg, StateDictTensor):
            yield arg


def _plain(arg: Any) -> Any:
    if type(arg) in (tuple, list):
        return type(arg)(map(_plain, arg))
    return arg.as_subclass(Tensor) if isinstance(arg, StateDictTensor) else arg
