"""How a module reads its weights once they are shards.

The module's class is replaced by a subclass with one property per parameter. Reading the property gathers; compiled
code and eager code go through the same door. There is one subclass per (class, parameter names), shared by all such
modules, and nothing about a particular module is baked into it: otherwise every layer would compile anew wherever a
graph breaks inside a block.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_zero.compat.tensors import functorch_unwrapped, is_functorch_wrapped
from lightning_zero.compat.lookup import Absent
from lightning_zero.compat.modules import skip_code
from lightning_zero.compat.tensors import DisableTorchFunction, DisableTorchFunctionSubclass
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import inverse
from lightning_zero.sharding.weight_reader import WeightReader

__all__ = [
    "UNSHARDED_CACHE",
    "ORDERS",
    "SHAPES",
    "ClassCache",
    "engine_of_class",
    "is_sharded",
    "pop_functional_call_read",
    "raise_copy_unsupported",
]

# Module attributes: parameter name -> whole shape, or None while the whole parameter is in place;
SHAPES = "_zero_shapes"
# parameter name -> order of its dimensions in memory, where that is not their own (channels_last);
ORDERS = "_zero_orders"
# and parameter name -> memory in which compiled code keeps the whole parameter until the optimizer steps.
UNSHARDED_CACHE = "_zero_resident"


def is_sharded(module: nn.Module) -> bool:
    """Whether this module's own parameters are shards."""
    return SHAPES in module.__dict__


def engine_of_class(module: nn.Module) -> Any:
    """The engine that a sharded module's class belongs to, or None when it is gone."""
    return cast(Any, type(module))._zero_cache.view.engine


def pop_functional_call_read(module: nn.Module) -> bool:
    """Whether eager code has read a weight, of this module or another of its engine's, that
    ``torch.func.functional_call`` had put in a shard's place, since the last question."""
    cache: Any = getattr(type(module), "_zero_cache", None)
    return cache is not None and cache.view.pop_functional_call_read()


def _weight_property(name: str) -> property:
    # Dynamo goes through this line by line, once for each weight that a model reads: nothing here that is for readers
    # only, such as cast().
    def read(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if param is None:
            return None
        shape: tuple[int, ...] | None = self._zero_shapes[name]
        if shape is None:
            return param
        if torch.compiler.is_compiling():
            # Modes, too (torch.set_default_device): Dynamo would ask the parameter's class after them, without end.
            with DisableTorchFunction():
                if not (self._zero_resident or self._zero_orders):  # of most modules
                    return torch.ops.lightning_zero.gather(param, shape, param.dtype)
                resident: Tensor | None = (self._zero_resident or {}).get(name)
                order: tuple[int, ...] | None = (self._zero_orders or {}).get(name)
                stored = shape if order is None else [shape[dim] for dim in order]
                weight = torch.ops.lightning_zero.gather(param, stored, param.dtype, resident)
                return weight if order is None else weight.permute(inverse(order))
        return _read_eagerly(self, param, shape)

    return property(read, doc=f"The whole parameter {name!r}, gathered from its shards.")


# Dynamo runs code that it cannot trace, as recurrent modules and loops that a graph breaks in, and would compile what
# is called from there: a graph for each weight, whose result is saved whole for backward. All reads share one code.
if not isinstance(skip_code, Absent):  # nothing is compiled then
    skip_code(cast(types.FunctionType, _weight_property("").fget).__code__)


@torch.compiler.disable
def _read_eagerly(module: Any, param: Tensor, shape: tuple[int, ...]) -> Tensor:
    view: WeightReader = module._zero_cache.view
    if view.reads_shards:
        return param
    if type(param) is not nn.Parameter and _is_given(param, shape, view):
        view.note_functional_call_read()
        return param
    view.note_read(cast(nn.Parameter, param))
    with DisableTorchFunctionSubclass():
        weight = torch.ops.lightning_zero.gather_eager(param, shape, param.dtype)
    return view.wrap(weight, cast(nn.Parameter, param))


def _is_given(weight: Tensor, shape: tuple[int, ...], view: WeightReader) -> bool:
    """Whether a whole weight is in the place of a shard, where ``torch.func.functional_call`` puts what it is given.

    Raises:
        UnsupportedError: a shard there, of which a transform is to be taken.
    """
    if isinstance(weight, nn.Parameter):
        return False
    base = weight
    while is_functorch_wrapped(base):
        base = functorch_unwrapped(base)
    shards = {record.shard.data_ptr() for record in view.engine.sharder.live}
    if weight.shape == shape and base.data_ptr() not in shards:
        return True
    if base is not weight:
        raise UnsupportedError(
            "torch.func was given module.parameters(), which are shards. Give it whole weights: what is read from the "
            "modules themselves, {'weight': module.weight, ...}."
        )
    return False


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: nn.RNNBase, value: Any) -> None:
    """Recurrent modules keep a list of their parameters; it would hold shards."""


class ClassCache:
    """Makes and remembers the subclasses, for one engine."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...]], type] = {}
        self.view = WeightReader()  # what eager code reads
        self._deepcopy: Callable[..., Any] = raise_copy_unsupported
        self._reduce: Callable[..., Any] = raise_copy_unsupported

    def copy_by(self, deepcopy: Callable[..., Any], reduce: Callable[..., Any]) -> None:
        """How modules are copied, (module, memo), and pickled, (module, protocol). Must keep no engine alive: torch
        remembers classes for longer than an engine lives."""
        self._deepcopy, self._reduce = deepcopy, reduce

    @contextmanager
    def copying_by(self, deepcopy: Callable[..., Any]) -> Iterator[None]:
        """Inside, modules are copied so."""
        before, self._deepcopy = self._deepcopy, deepcopy
        try:
            yield
        finally:
            self._deepcopy = before

    def deepcopy(self, module: nn.Module, memo: dict[Any, Any]) -> Any:
        """For ``copy.deepcopy``."""
        return self._deepcopy(module, memo)

    def reduce(self, module: nn.Module, protocol: Any) -> Any:
        """For ``pickle`` and ``copy.copy``."""
        return self._reduce(module, protocol)

    def swap(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Gives ``module`` the subclass whose properties read ``names``.

        Raises:
            UnsupportedError: the module's class cannot be subclassed, or is a scripted one.
        """
        self.check(module)
        original = getattr(type(module), "_zero_original_class", type(module))
        key = (original, names)
        if key not in self._classes:
            self._classes[key] = _subclass(original, names, self)
        try:
            module.__class__ = self._classes[key]
        except TypeError as error:
            raise UnsupportedError(f"The parameters of {original.__name__} cannot be sharded: {error}.") from error

    @staticmethod
    def check(module: nn.Module) -> None:
        """Raises :class:`UnsupportedError` for modules whose parameters cannot be read through a property."""
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(module).__name__} is a torch.jit.ScriptModule; its parameters cannot be sharded. Pass the "
                "Python module."
            )

    @staticmethod
    def restore(module: nn.Module) -> None:
        """Gives ``module`` its own class back, and forgets what its properties knew."""
        for attribute in (SHAPES, ORDERS, UNSHARDED_CACHE):
            module.__dict__.pop(attribute, None)
        module.__class__ = getattr(type(module), "_zero_original_class", type(module))


def _subclass(original: type, names: tuple[str, ...], cache: ClassCache) -> type:
    members: dict[str, Any] = {name: _weight_property(name) for name in names}
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, _ignore)
    members.update(
        _zero_original_class=original,
        _zero_cache=cache,
        # No dicts: torch 2.11's Dynamo compares, in each step, that those of any two weights are the same object.
        _zero_resident=None,
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
    """Raises :class:`UnsupportedError`: there is no engine, or none any more."""
    raise UnsupportedError(
        f"A sharded {type(module).__name__} cannot be copied or pickled without its engine. Copy its values instead "
        "(`fresh.load_state_dict(module.state_dict())`, on every rank)."
    )
