"""Make ``state_dict()`` and ``load_state_dict()`` of a sharded module use full parameters.

``state_dict()`` gathers, so it is collective. ``load_state_dict()`` is not: each rank takes its part of the full
values. Checkpoint formats replace the full values by :meth:`StateDictHooks.overriding_values`. Writing to a value of a
``state_dict()`` writes to the parameter, as in a plain module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.host_memory import as_mapped, copy_to_host
from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.param_record import ShardedParameter, gather_full
from lightning_zero.sharding.sharder import Sharder

ValueOf = Callable[[ShardedParameter], torch.Tensor | None]


def full_on_cpu(record: ShardedParameter, keep: bool = True) -> torch.Tensor | None:
    """Return the full parameter in CPU memory without padding, or None if not ``keep``. Collective."""
    full = gather_full(record)  # one at a time, so that the peak is one full parameter
    return copy_to_host(full) if keep else None


def ignore_bytes(count: int) -> None:
    """Ignore a progress report."""


class StateDictHooks:
    """Install hooks for state dicts on modules that own shards.

    ``on_loaded_bytes`` is called with the bytes of each shard that ``load_state_dict()`` overwrites.
    """

    def __init__(self, sharder: Sharder) -> None:
        self.sharder = sharder
        self.on_loaded_bytes: Callable[[int], object] = ignore_bytes
        self._value_of: ValueOf = full_on_cpu
        self._handles: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()

    def install(self, root: nn.Module) -> None:
        """Install hooks on ``root`` and all modules in it that own shards, unless they have some."""
        for module in root.modules():
            if SHAPES in module.__dict__ and module not in self._handles:
                self._handles[module] = [
                    module.register_state_dict_post_hook(partial(self._fill_state_dict)),
                    module.register_load_state_dict_pre_hook(self._load_shards),
                ]

    def install_on_copy(self, copy: nn.Module, original: nn.Module) -> None:
        """Install hooks on a copy, in place of those copied from the original."""
        for handle in self._handles.get(original, ()):
            copy._state_dict_hooks.pop(handle.id, None)
            copy._load_state_dict_pre_hooks.pop(handle.id, None)
        self.install(copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictHooks:
        return self  # hooks of a copied module belong to this object

    def remove(self) -> None:
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles.clear()

    @contextmanager
    def overriding_values(self, value_of: ValueOf) -> Iterator[None]:
        """Inside, ``state_dict()`` holds the result of ``value_of`` for each sharded parameter.

        There is no entry if the result is None.

        ``value_of`` is called in the order of the keys, for a tied parameter once per key.
        """
        before, self._value_of = self._value_of, value_of
        try:
            yield
        finally:
            self._value_of = before

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        self.sharder.sync.before_reading()
        for key, shape in module.__dict__[SHAPES].items():
            param = module._parameters.get(key)
            record = None if param is None else self.sharder.find(param)
            if record is None or shape is None or prefix + key not in state:
                continue
            shown = self._value_of(record)
            if shown is None:
                del state[prefix + key]
            else:
                written = self._value_of is full_on_cpu
                state[prefix + key] = StateDictTensor.of(shown, record, self.sharder) if written else shown

    def _load_shards(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *arguments: Any
    ) -> None:
        _strict, _missing, _unexpected, errors = arguments  # the signature that torch calls
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError("load_state_dict(assign=True) would replace shards. Leave out assign=True.")
        self.sharder.sync.flush_user_writes()
        for key, shape in module.__dict__[SHAPES].items():
            param, full = module._parameters.get(key), state.get(prefix + key)
            record = None if param is None else self.sharder.find(param)
            if record is None or shape is None or full is None:
                continue
            if full.shape != record.shape:
                errors.append(
                    f"size mismatch for {prefix + key}: the checkpoint has shape {tuple(full.shape)}, the model "
                    f"{tuple(record.shape)}."
                )
                assert param is not None
                state[prefix + key] = param.detach()  # unchanged, and not also reported as missing
                continue
            state[prefix + key] = record.spec.wrap(
                record.local_part(as_mapped(full))
            )  # torch compares with the full shape
            self.on_loaded_bytes(record.shard.nbytes)


_IN_PLACE = frozenset(
    ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__"]
)


class StateDictTensor(Tensor):
    """Hold a full value of a state dict, or a view of one. Results computed from it are plain tensors."""

    _zero_full: Tensor
    _zero_write: Callable[[Tensor], None]

    @staticmethod
    def of(full: Tensor, record: ShardedParameter, sharder: Sharder) -> Tensor:
        return _view(full, full, _Writer(record, sharder))

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = next(_values(args), None)
        if name == "__set__" and first is args[0] and func.__self__.__name__ == "data":
            first.__class__ = Tensor  # `value.data = x` detaches from the parameter
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
    """Write a full value to the shards of the parameter that it was read from."""

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
            record.param.copy_(full if record.format is None else record.local_part(full))
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
