"""Functions of torch that take a tensor's memory without a call of its ``__torch_function__``.

A subclass cannot intercept them, so a shard would pass for a full tensor. They are replaced by functions that look at
their arguments first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch.distributed
import torch.jit._builtins
import torch.utils._device

__all__ = ["BROADCAST", "TENSOR", "look_first"]

Look = Callable[[str, tuple[Any, ...]], tuple[Any, ...]]

TENSOR, BROADCAST = "torch.tensor", "_broadcast_coalesced"

# Each replaced function, with its name for users.
_REPLACED = [
    # Copies a tensor, with a warning that says to use clone(). (torch 2.11+)
    (torch, "tensor", TENSOR),
    (torch, "as_tensor", "torch.as_tensor"),
    (torch, "asarray", "torch.asarray"),
    # Broadcasts a list of tensors, which DDP uses. (torch 2.11+)
    (torch.distributed, "_broadcast_coalesced", BROADCAST),
    # Makes the variables that torch.func.grad and its like differentiate for. (torch 2.11+)
    (torch._functorch.eager_transforms, "_wrap_tensor_for_grad", "torch.func.grad"),
]


def look_first(look: Look) -> None:
    """Have ``look`` called with each call's function name and positional arguments, of which it returns those to use.

    Compiled code is not affected. The second and later calls of this function do nothing.
    """
    if hasattr(torch.tensor, "_looks"):
        return
    # Lists torch.tensor as it is when first asked: what torch.device contexts apply to. (torch 2.11+)
    torch.utils._device._device_constructors()
    for module, name, shown in _REPLACED:
        setattr(module, name, _looking(getattr(module, name), shown, look))
    # TorchScript knows functions by their ids. (torch 2.11+)
    torch.jit._builtins._register_builtin(torch.tensor, "aten::tensor")


def _looking(function: Callable[..., Any], name: str, look: Look) -> Callable[..., Any]:
    @wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return function(*look(name, args), **kwargs)

    looking._looks = True  # type: ignore[attr-defined]
    return looking
