"""How a module reads its weights once they are shards.

The module's class is replaced by a subclass with one property per parameter. Reading the property gathers; compiled
code and eager code go through the same door. There is one subclass per (class, parameter names), shared by all such
modules, and nothing about a particular module is baked into it: otherwise every layer would compile anew wherever a
graph breaks inside a block.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError

__all__ = ["KEPT", "SHAPES", "ClassCache", "engine_of_class", "is_sharded"]

# Module attributes: parameter name -> whole shape, or None while the whole parameter is in place;
SHAPES = "_zero_shapes"
# and parameter name -> memory in which compiled code keeps the whole parameter until the optimizer steps.
KEPT = "_zero_kept"


def is_sharded(module: nn.Module) -> bool:
    """Whether this module's own parameters are shards."""
    return SHAPES in module.__dict__


def engine_of_class(module: nn.Module) -> Any:
    """The engine that a sharded module's class belongs to, or None when it is gone."""
    return cast(Any, type(module))._zero_cache.engine()


class _Whole(nn.Parameter):
    """A gathered parameter while a model is being built. Its memory is what is watched for edits, so assigning ``data``
    writes there."""

    def _write(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    data = property(lambda self: self.detach(), _write)


def _weight_property(name: str) -> property:
    def read(self: nn.Module) -> Tensor | None:
        param = self._parameters[name]
        if param is None:
            return None
        shape = cast("dict[str, tuple[int, ...] | None]", self._zero_shapes)[name]
        if shape is None:
            return param
        if torch.compiler.is_compiling():
            kept = cast("dict[str, Tensor]", self._zero_kept).get(name)
            return torch.ops.lightning_zero.gather(param, shape, param.dtype, kept)
        cache = cast(Any, self)._zero_cache
        if cache.as_shards:
            return param
        cache.last_read = param
        weight = torch.ops.lightning_zero.gather_eager(param, shape, param.dtype)
        # While a model is being built, `head.weight = embedding.weight` must see a Parameter.
        return _Whole(weight.detach(), param.requires_grad) if cache.as_parameters else weight

    return property(read, doc=f"The whole parameter {name!r}, gathered from its shards.")


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: nn.RNNBase, value: Any) -> None:
    """Recurrent modules keep a list of their parameters; it would hold shards."""


class ClassCache:
    """Makes and remembers the subclasses, for one engine."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...]], type] = {}
        self.engine: Callable[[], Any] = lambda: None  # how a sharded module finds its engine
        self.last_read: nn.Parameter | None = None  # by eager code
        self.as_parameters = False  # what eager code reads is an nn.Parameter
        self.as_shards = False  # what eager code reads is the registered nn.Parameter, a shard

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
        """Gives ``module`` its own class back."""
        module.__class__ = getattr(type(module), "_zero_original_class", type(module))


def _subclass(original: type, names: tuple[str, ...], cache: ClassCache) -> type:
    members: dict[str, Any] = {name: _weight_property(name) for name in names}
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, _ignore)
    members.update(
        _zero_original_class=original,
        _zero_cache=cache,
        _zero_kept={},
        __module__=original.__module__,
        __qualname__=original.__qualname__,
        __doc__=original.__doc__,
        __reduce_ex__=_refuse_to_copy,
    )
    return types.new_class(original.__name__, (original,), exec_body=lambda body: body.update(members))


def _refuse_to_copy(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"A sharded {type(self).__name__} cannot be copied or pickled: the copy's shards would belong to no engine. "
        "Copy its values instead (`fresh.load_state_dict(module.state_dict())`, on every rank), make it a plain module "
        "with lightning_zero.unshard(module), or save a checkpoint with trainer.save_checkpoint()."
    )
