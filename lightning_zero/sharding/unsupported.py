"""What cannot be done to one rank's shard, and the line to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from lightning_zero.compat.tensors import DisableTorchFunctionSubclass
from lightning_zero.errors import UnsupportedError

if TYPE_CHECKING:
    from lightning_zero.sharding.shard_tensor import ShardSpec

__all__ = ["without_shard_dispatch", "no_shard_dispatch", "raise_unsupported", "raise_unsupported_for", "spec_of"]

P = ParamSpec("P")
R = TypeVar("R")


def no_shard_dispatch() -> AbstractContextManager[None]:
    """Inside, shards in sight are ordinary tensors, and as quick; what is computed of them is out of sight."""
    return DisableTorchFunctionSubclass()


def without_shard_dispatch(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs :func:`no_shard_dispatch`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_shard_dispatch():
            return function(*args, **kwargs)

    return run


def spec_of(args: Iterable[Any]) -> ShardSpec:
    """The sight of the first shard among these, or in lists among them."""
    for value in args:
        if isinstance(value, Tensor):
            if "_zero_spec" in value.__dict__:
                return value.__dict__["_zero_spec"]
        elif isinstance(value, tuple | list):
            try:
                return spec_of(value)
            except LookupError:
                continue
    raise LookupError("no shard")


def raise_unsupported(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    """Raises :class:`UnsupportedError` for a function that needs more than one rank's elements."""
    raise_unsupported_for(func, spec_of((*args, *kwargs.values())))


def raise_unsupported_for(func: Any, spec: ShardSpec) -> NoReturn:
    """Likewise, of the shards in this sight."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f".{func.__self__.__name__}"
    own = spec.name.rpartition(".")[2]
    raise UnsupportedError(
        f"{name} was asked of this rank's shard of {spec.name!r} (shape {tuple(spec.layout.visible_shape)} of "
        f"{tuple(spec.layout.shape)}), as param, param.data and param.grad are, and would give another result on "
        f"each rank. Read the whole parameter from the module that owns it, `module.{own}`; or put "
        "whole parameters in place for a while: `with lightning_zero.full_parameters(module): ...`. "
        "Do so on every rank. Elementwise functions, and norms, sums, means and extrema over all elements, work here; "
        "param.to_local() copies this rank's elements."
    )
