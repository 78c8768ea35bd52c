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
    from lightning_zero.sharding.shard_tensor import Sight

__all__ = ["on_plain_tensors", "plainly", "refuse", "refuse_for", "sight_of"]

P = ParamSpec("P")
R = TypeVar("R")


def plainly() -> AbstractContextManager[None]:
    """Inside, shards in sight are ordinary tensors, and as quick; what is computed of them is out of sight."""
    return DisableTorchFunctionSubclass()


def on_plain_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs :func:`plainly`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with plainly():
            return function(*args, **kwargs)

    return run


def sight_of(args: Iterable[Any]) -> Sight:
    """The sight of the first shard among these, or in lists among them."""
    for value in args:
        if isinstance(value, Tensor):
            if "_zero_sight" in value.__dict__:
                return value.__dict__["_zero_sight"]
        elif isinstance(value, tuple | list):
            try:
                return sight_of(value)
            except LookupError:
                continue
    raise LookupError("no shard")


def refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    """Raises :class:`UnsupportedError` for a function that needs more than one rank's elements."""
    refuse_for(func, sight_of((*args, *kwargs.values())))


def refuse_for(func: Any, sight: Sight) -> NoReturn:
    """Likewise, of the shards in this sight."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f".{func.__self__.__name__}"
    own = sight.name.rpartition(".")[2]
    raise UnsupportedError(
        f"{name} was asked of this rank's shard of {sight.name!r} (shape {tuple(sight.layout.visible_shape)} of "
        f"{tuple(sight.layout.shape)}), as param, param.data and param.grad are, and would give another result on "
        f"each rank. Read the whole parameter from the module that owns it, `module.{own}`; or put "
        "whole parameters in place for a while: `with lightning_zero.full_parameters(module): ...`. "
        "Do so on every rank. Elementwise functions, and norms, sums, means and extrema over all elements, work here; "
        "param.to_local() copies this rank's elements."
    )
