"""What the user compiled by hand is taken apart: it would gather its weights outside of our passes, and keep them.

``self.net = torch.compile(net)`` calls net's values ``net._orig_mod.weight`` in files. They keep that name, so that the
file fits the user's own module; files with and without it are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from lightning_zero.compat.compiler import OptimizedModule

__all__ = ["keep_compiled_names", "plain_name", "read_compiled_names", "take_apart_compiled"]

_NAME = "_orig_mod."


def take_apart_compiled(module: nn.Module) -> list[nn.Module]:
    """Puts in the place of each compiled module the one that it was made from; returns these, inner ones first."""
    found = []
    for child in module.modules():
        child._compiled_call_impl = None
        for name, grandchild in list(child._modules.items()):
            if isinstance(grandchild, OptimizedModule):
                child._modules[name] = grandchild._orig_mod
                found.append(grandchild._orig_mod)
    return found[::-1]


def plain_name(key: str) -> str:
    """What a value is called where nothing is compiled."""
    return key.replace(_NAME, "")


def read_compiled_names(root: nn.Module, compiled: Iterable[nn.Module]) -> None:
    """Files in which other modules were compiled are read, too. Must come before hooks that look for their weights."""
    for module in [root, *compiled]:
        module.register_load_state_dict_pre_hook(_without_names)


def keep_compiled_names(compiled: Iterable[nn.Module]) -> None:
    """State dicts call what is in these modules as if they were compiled. Must come after hooks that look for their
    weights."""
    for module in compiled:
        module.register_state_dict_post_hook(partial(_with_names))  # torch leaves a mark on the function


def _without_names(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and _NAME in key[len(prefix) :]]:
        state[prefix + plain_name(key[len(prefix) :])] = state.pop(key)


def _with_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:  # all of them: they keep their order
        state[prefix + _NAME + key[len(prefix) :]] = state.pop(key)
