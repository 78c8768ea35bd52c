"""Functions of torch that take a tensor's memory without a call of its ``__torch_function__``.

A subclass cannot intercept them, so a shard would pass for a full tensor. They are replaced by functions that look at
their arguments first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from lightning_zero.compat.lookup import find, private
from lightning_zero.compat.patches import Patch
from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.compat.versions import minor

__all__ = ["BROADCAST", "TENSOR", "check_tensor_arguments"]

Look = Callable[[str, tuple[Any, ...]], tuple[Any, ...]]

TENSOR, BROADCAST = "torch.tensor", "_broadcast_coalesced"

_EAGER = "torch._functorch.eager_transforms"
# Lists torch.tensor as it is when first asked: what torch.device contexts apply to. (torch 2.11+)
_device_constructors = private("torch.utils._device._device_constructors")
# Tells TorchScript of a function, which it knows by its id. (torch 2.11+)
_register_builtin = private("torch.jit._builtins._register_builtin")

_COPIES = Patch(
    "torch.tensor, torch.as_tensor and torch.asarray take the full parameter, and without this the shard",
    # Copy a tensor; the first with a warning that says to use clone(). (torch 2.11+)
    {"torch.tensor": None, "torch.as_tensor": None, "torch.asarray": None},
    needs=("torch.utils._device._device_constructors", "torch.jit._builtins._register_builtin"),
)
_BROADCASTS = Patch(
    "a broadcast of shards by torch's own function is refused",
    # Broadcasts a list of tensors, which DDP uses. (torch 2.11+)
    {"torch.distributed._broadcast_coalesced": None},
)
_TRANSFORMS = Patch(
    "torch.func.grad over parameters takes the full ones, and without this the shards",
    # Makes the variables that torch.func.grad and its like differentiate for. (torch 2.11+)
    {f"{_EAGER}._wrap_tensor_for_grad": "maybe_tensor, level"},
)
# Asked by torch 2.13 and newer whether an argument intercepts them, and by 2.11 not, unlike others of their module. The
# parameters do not matter. (torch 2.11+)
_ASKED_LATER = (
    *("isend", "irecv", "send", "recv", "broadcast", "reduce", "all_reduce_coalesced", "all_gather_coalesced"),
    *("gather", "scatter", "reduce_scatter", "all_to_all"),
)
_HOMES = ("torch.distributed", "torch.distributed.distributed_c10d")
_COLLECTIVES = (
    [
        Patch(
            "collectives of torch.distributed are refused for shards",
            {f"{home}.{name}": None for name in _ASKED_LATER for home in _HOMES},
        )
    ]
    if minor(str(torch.__version__)) < (2, 13)
    else []
)
# Names for users.
_SHOWN = {"torch.distributed._broadcast_coalesced": BROADCAST, f"{_EAGER}._wrap_tensor_for_grad": "torch.func.grad"}


def check_tensor_arguments(look: Look) -> None:
    """Have ``look`` called with each call's function name and positional arguments, of which it returns those to use.

    Compiled code is not affected. The second and later calls of this function do nothing.
    """
    if hasattr(torch.tensor, "_looks"):
        return
    for patch in (_COPIES, _BROADCASTS, _TRANSFORMS, *_COLLECTIVES):
        if patch.reason:
            patch.say()
            continue
        if patch is _COPIES:
            _device_constructors()
        for name in patch.names:
            path, _, attribute = name.rpartition(".")
            owner = find(path)
            function = getattr(owner, attribute)
            replacement = (
                _asking(function) if patch in _COLLECTIVES else _looking(function, _SHOWN.get(name, name), look)
            )
            setattr(owner, attribute, replacement)
        if patch is _COPIES:
            _register_builtin(torch.tensor, "aten::tensor")


@cache  # so that both modules have the same function, as torch compares them by identity
def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and has_torch_function(values := tree_leaves((args, kwargs))):
            return handle_torch_function(asking, values, *args, **kwargs)
        return function(*args, **kwargs)

    return asking


def _looking(function: Callable[..., Any], name: str, look: Look) -> Callable[..., Any]:
    @wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return function(*look(name, args), **kwargs)

    looking._looks = True  # type: ignore[attr-defined]
    return looking
