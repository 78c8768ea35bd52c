"""Functions of torch that read a tensor's memory without calling its ``__torch_function__``.

A subclass cannot intercept them, so a shard would pass for a full tensor. They are replaced, for the process, by
functions that check their arguments first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from lightning_zero.compat.lookup import find, private
from lightning_zero.compat.modules import skip_frame
from lightning_zero.compat.patches import Patch
from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.compat.versions import minor

ArgumentCheck = Callable[[str, tuple[Any, ...]], tuple[Any, ...]]

TENSOR, BROADCAST = "torch.tensor", "_broadcast_coalesced"

_EAGER = "torch._functorch.eager_transforms"
# Registers a function with TorchScript, which identifies it by its id. (torch 2.11+)
_register_builtin = private("torch.jit._builtins._register_builtin")

_COPIES = Patch(
    "torch.tensor, torch.as_tensor and torch.asarray copy the full parameter instead of the shard",
    # Copy a tensor. (torch 2.11+)
    {"torch.tensor": None, "torch.as_tensor": None, "torch.asarray": None},
    needs={"torch.jit._builtins._register_builtin": "fn, op"},
)
_BROADCASTS = Patch(
    "broadcasts of shards by torch's own function raise an error",
    # Broadcasts a list of tensors for DDP. (torch 2.11+)
    {"torch.distributed._broadcast_coalesced": None},
)
_TRANSFORMS = Patch(
    "torch.func.grad over parameters uses full ones instead of shards",
    # Wraps the inputs of torch.func.grad and similar functions. (torch 2.11+)
    {f"{_EAGER}._wrap_tensor_for_grad": "maybe_tensor, level"},
)
# Collectives that call __torch_function__ of their arguments in torch 2.13 but not in 2.11. (torch 2.11+)
_WITHOUT_DISPATCH = (
    *("isend", "irecv", "send", "recv", "broadcast", "reduce", "all_reduce_coalesced", "all_gather_coalesced"),
    *("gather", "scatter", "reduce_scatter", "all_to_all"),
)
_HOMES = ("torch.distributed", "torch.distributed.distributed_c10d")
_COLLECTIVES = (
    [
        Patch(
            "collectives of torch.distributed raise an error for shards",
            {f"{home}.{name}": None for name in _WITHOUT_DISPATCH for home in _HOMES},
        )
    ]
    if minor(str(torch.__version__)) < (2, 13)
    else []
)
# Names that users know.
_PUBLIC_NAMES = {
    "torch.distributed._broadcast_coalesced": BROADCAST,
    f"{_EAGER}._wrap_tensor_for_grad": "torch.func.grad",
}


def check_tensor_arguments(check: ArgumentCheck) -> None:
    """Call ``check`` before each call of these functions.

    It gets the name and positional arguments, and returns the arguments to use. Compiled code is not affected. Later
    calls of this function do nothing.
    """
    if hasattr(torch.tensor, "_checks"):
        return
    check = torch.compiler.disable(check)
    for patch in (_COPIES, _BROADCASTS, _TRANSFORMS, *_COLLECTIVES):
        if patch.reason:
            patch.log_once()
            continue
        if patch is _COPIES:
            # torch.device contexts apply to the functions that exist at their first use.
            with torch.device("meta"):
                torch.empty(0)
        for name in patch.names:
            path, _, attribute = name.rpartition(".")
            owner = find(path)
            function = getattr(owner, attribute)
            replacement = (
                _dispatch(function)
                if patch in _COLLECTIVES
                else _check_first(function, _PUBLIC_NAMES.get(name, name), check)
            )
            setattr(owner, attribute, replacement)
        if patch is _COPIES:
            _register_builtin(torch.tensor, "aten::tensor")


@cache  # both modules must have the same function: torch compares them by identity
def _dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and has_torch_function(values := tree_leaves((args, kwargs))):
            return handle_torch_function(dispatch, values, *args, **kwargs)
        return function(*args, **kwargs)

    skip_frame(dispatch)  # a builtin has no frame: Dynamo would compile this one where eager code calls it
    return dispatch


def _check_first(function: Callable[..., Any], name: str, check: ArgumentCheck) -> Callable[..., Any]:
    @wraps(function)
    def check_first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return function(*check(name, args), **kwargs)

    check_first._checks = True  # type: ignore[attr-defined]
    # Dynamo traces this function instead. It finds torch's functions by their names, again after each
    # init_process_group(): graphs would call check_first, which AOTAutograd does not cache. (torch 2.11+)
    check_first._torchdynamo_inline = function  # type: ignore[attr-defined]
    skip_frame(check_first)
    return check_first
