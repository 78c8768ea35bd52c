"""Replace a module's class by a subclass whose properties gather its parameters.

There is one property per parameter; compiled and eager code read the same one. All modules of one (class, parameter
names) share one subclass, and nothing about a particular module is stored in it. Otherwise every layer would be
compiled again if a graph breaks inside a block. ``torch.nn.utils.parametrize`` replaces classes in the same way, but
per module.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import DisableTorchFunction, DisableTorchFunctionSubclass, Tensor, nn

from lightning_zero.compat.lookup import Absent
from lightning_zero.compat.modules import skip_code
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.adapted_parameters import DELTAS, adapted_property
from lightning_zero.sharding.layout import inverse
from lightning_zero.sharding.weight_format import WeightKind, packed_words
from lightning_zero.sharding.weight_reader import WeightReader

# Module attributes. Parameter name -> full shape, or None while the full parameter is installed;
SHAPES = "_zero_shapes"
# parameter name -> memory order of its dimensions, if it differs from their own order (channels_last);
ORDERS = "_zero_orders"
# parameter name -> kind and dtype of a packed frozen weight;
FORMATS = "_zero_formats"
# parameter name -> memory in which compiled code keeps the unsharded parameter until the optimizer steps.
UNSHARDED_CACHE = "_zero_unsharded_cache"


def is_sharded(module: nn.Module) -> bool:
    """Return True if this module's own parameters are shards."""
    return SHAPES in module.__dict__


def engine_of_class(module: nn.Module) -> Any:
    """Return the engine of a sharded module's class, or None after it is deleted."""
    return cast(Any, type(module))._zero_cache.reader.engine


def pop_functional_call_read(module: nn.Module) -> bool:
    """Return True if eager code has read a weight of ``torch.func.functional_call`` since last asked.

    The weight may be of any module of the same engine.
    """
    cache: Any = getattr(type(module), "_zero_cache", None)
    return cache is not None and cache.reader.pop_functional_call_read()


def _weight_property(name: str) -> property:
    # Dynamo traces this for each weight that a model reads, so it has no calls that do nothing, such as cast().
    def read(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if param is None:
            return None
        shape: tuple[int, ...] | None = self._zero_shapes[name]
        if shape is None:
            return param
        if torch.compiler.is_compiling():
            # Disable modes, too (torch.set_default_device): after them Dynamo would call the class's rule endlessly.
            with DisableTorchFunction():
                if not (self._zero_unsharded_cache or self._zero_orders):  # true for most modules
                    return torch.ops.lightning_zero.gather(param, shape, param.dtype)
                cache: Tensor | None = (self._zero_unsharded_cache or {}).get(name)
                order: tuple[int, ...] | None = (self._zero_orders or {}).get(name)
                stored = shape if order is None else [shape[dim] for dim in order]
                weight = torch.ops.lightning_zero.gather(param, stored, param.dtype, cache)
                return weight if order is None else weight.permute(inverse(order))
        return _read_eagerly(self, param, shape)

    return property(read, doc=f"The full parameter {name!r}, gathered from its shards.")


def _packed_property(name: str, kind: str, dtype: torch.dtype) -> property:
    def read(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if param is None:
            return None
        shape: tuple[int, ...] | None = self._zero_shapes[name]
        if shape is None:
            return param
        if torch.compiler.is_compiling():
            with DisableTorchFunction():
                cache: Tensor | None = (self._zero_unsharded_cache or {}).get(name)
                words = (packed_words(shape[0], shape[1], kind),)
                packed = torch.ops.lightning_zero.gather(param, words, torch.int32, cache)
                return torch.ops.lightning_zero_weights.dequantize(packed, shape, dtype, kind)
        return _read_packed_eagerly(self, param)

    return property(read, doc=f"The full parameter {name!r}, computed from its gathered codes.")


# From code that Dynamo cannot trace (recurrent modules, loops with a graph break) it would compile each read as a graph
# that saves the full weight for backward. All properties share one code object, which is skipped here.
if not isinstance(skip_code, Absent):  # without Dynamo's skip_code, nothing is compiled
    for _property in (
        _weight_property(""),
        _packed_property("", "nf4", torch.float32),
        adapted_property(_weight_property(""), ""),
    ):
        skip_code(cast(types.FunctionType, _property.fget).__code__)


@torch.compiler.disable
def _read_eagerly(module: Any, param: Tensor, shape: tuple[int, ...]) -> Tensor:
    reader: WeightReader = module._zero_cache.reader
    if reader.reads_shards:
        return param
    if type(param) is not nn.Parameter and _is_functional_call_weight(param, shape, reader):
        reader.note_functional_call_read()
        return param
    reader.note_read(cast(nn.Parameter, param))
    with DisableTorchFunctionSubclass():
        weight = torch.ops.lightning_zero.gather_eager(param, shape, param.dtype)
    return reader.wrap(weight, cast(nn.Parameter, param))


@torch.compiler.disable
def _read_packed_eagerly(module: Any, param: Tensor) -> Tensor:
    reader: WeightReader = module._zero_cache.reader
    if reader.reads_shards:
        return param
    if not isinstance(param, nn.Parameter):
        reader.note_functional_call_read()
        return param
    return reader.read_packed(param)


def _is_functional_call_weight(weight: Tensor, shape: tuple[int, ...], reader: WeightReader) -> bool:
    """Return True if ``torch.func.functional_call`` has put a full weight in the place of a shard.

    Raises:
        UnsupportedError: it is a shard inside a functorch transform.
    """
    if isinstance(weight, nn.Parameter):
        return False
    base = torch.func.debug_unwrap(weight)
    shards = {record.shard.data_ptr() for record in reader.engine.sharder.live}
    if weight.shape == shape and base.data_ptr() not in shards:
        return True
    if base is not weight:
        raise UnsupportedError(
            "torch.func was given module.parameters(), which are shards. Pass full weights, read from the modules: "
            "{'weight': module.weight, ...}."
        )
    return False


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore_flat_weights(self: nn.RNNBase, value: Any) -> None:
    """Ignore the list of parameters that recurrent modules keep; it would hold shards."""


_Packed = tuple[str, str, torch.dtype]  # a parameter's name, and the kind and dtype of its format


class ClassCache:
    """Create and cache the subclasses of one engine."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...], tuple[str, ...], tuple[_Packed, ...]], type] = {}
        self.reader = WeightReader()
        self._deepcopy: Callable[..., Any] = raise_copy_unsupported
        self._reduce: Callable[..., Any] = raise_copy_unsupported

    def set_copiers(self, deepcopy: Callable[..., Any], reduce: Callable[..., Any]) -> None:
        """Set the functions that deep-copy (module, memo) and pickle (module, protocol) modules.

        They must not keep the engine alive, because torch caches classes for longer than an engine lives.
        """
        self._deepcopy, self._reduce = deepcopy, reduce

    @contextmanager
    def overriding_deepcopy(self, deepcopy: Callable[..., Any]) -> Iterator[None]:
        """Inside, deep-copy modules by this function."""
        before, self._deepcopy = self._deepcopy, deepcopy
        try:
            yield
        finally:
            self._deepcopy = before

    def deepcopy(self, module: nn.Module, memo: dict[Any, Any]) -> Any:
        """Implement ``copy.deepcopy`` of a module."""
        return self._deepcopy(module, memo)

    def reduce(self, module: nn.Module, protocol: Any) -> Any:
        """Implement ``pickle`` and ``copy.copy`` of a module."""
        return self._reduce(module, protocol)

    def install_class(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Give ``module`` the subclass whose properties read ``names``."""
        self.check(module)
        original = getattr(type(module), "_zero_original_class", type(module))
        formats: dict[str, tuple[WeightKind, torch.dtype]] = module.__dict__.get(FORMATS, {})
        packed = tuple(sorted((name, *found) for name, found in formats.items()))
        key = (original, names, tuple(sorted(module.__dict__.get(DELTAS, ()))), packed)
        if key not in self._classes:
            self._classes[key] = _subclass(*key, self)
        try:
            module.__class__ = self._classes[key]
        except TypeError as error:
            raise UnsupportedError(f"The parameters of {original.__name__} cannot be sharded: {error}.") from error

    @staticmethod
    def check(module: nn.Module) -> None:
        """Raise :class:`UnsupportedError` for modules whose parameters cannot be read through a property."""
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(module).__name__} is a torch.jit.ScriptModule; its parameters cannot be sharded. Pass the "
                "Python module."
            )

    @staticmethod
    def restore(module: nn.Module) -> None:
        """Restore the module's own class, and delete the attributes of the subclass."""
        for attribute in (SHAPES, ORDERS, FORMATS, UNSHARDED_CACHE, DELTAS):
            module.__dict__.pop(attribute, None)
        module.__class__ = getattr(type(module), "_zero_original_class", type(module))


def _subclass(
    original: type, names: tuple[str, ...], adapted: tuple[str, ...], packed: tuple[_Packed, ...], cache: ClassCache
) -> type:
    members: dict[str, Any] = {name: _weight_property(name) for name in names}
    members.update({name: _packed_property(name, kind, dtype) for name, kind, dtype in packed})
    members.update({name: adapted_property(members[name], name) for name in adapted if name in members})
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, _ignore_flat_weights)
    members.update(
        _zero_original_class=original,
        _zero_cache=cache,
        # None instead of dicts: torch 2.11's Dynamo guards that the dicts of any two weights are one object.
        _zero_unsharded_cache=None,
        _zero_orders=None,
        __module__=original.__module__,
        __qualname__=original.__qualname__,
        __doc__=original.__doc__,
        __deepcopy__=_deepcopy,
        __reduce_ex__=_reduce,
    )
    return types.new_class(original.__name__, (original,), exec_body=lambda body: body.update(members))


def _deepcopy(self: nn.Module, memo: dict[Any, Any]) -> Any:
    return cast(Any, self)._zero_cache.deepcopy(self, memo)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    return cast(Any, self)._zero_cache.reduce(self, protocol)


def raise_copy_unsupported(module: nn.Module, *unused: Any) -> Any:
    """Raise :class:`UnsupportedError`, because the module has no engine, or its engine is deleted."""
    raise UnsupportedError(
        f"A sharded {type(module).__name__} cannot be copied or pickled without its engine. Copy its values instead "
        "(`fresh.load_state_dict(module.state_dict())`, on every rank)."
    )
