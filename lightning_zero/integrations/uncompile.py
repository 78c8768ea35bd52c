"""What the user compiled by hand is taken apart: it would gather its weights outside of our passes, and keep them.

``self.net = torch.compile(net)`` calls net's values ``net._orig_mod.weight`` in files. They keep that name, so that the
file fits the user's own module; files with and without it are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_zero.compat.compiler import OptimizedModule
from lightning_zero.integrations.compiled_functions import uncompile_functions

__all__ = ["UncompiledModule", "save_compiled_names", "uncompiled_name", "accept_compiled_names", "uncompile_modules"]

_NAME = "_orig_mod."


class UncompiledModule(NamedTuple):
    """A module that was compiled by hand.

    Attributes:
        module: the one that it was made from.
        places: where it was compiled: the module around it, and its name there.
        everywhere: nowhere is it plain, too (``self.fast = torch.compile(self.net)``).
    """

    module: nn.Module
    places: list[tuple[nn.Module, str]]
    everywhere: bool


def uncompile_modules(module: nn.Module) -> list[UncompiledModule]:
    """Puts in the place of what is compiled what it was made from; returns the modules among that, inner ones first."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    plain = set()
    for child in module.modules():
        child._compiled_call_impl = None
        for name, grandchild in list(child._modules.items()):
            if isinstance(grandchild, OptimizedModule):
                child._modules[name] = grandchild._orig_mod
                found.setdefault(grandchild._orig_mod, []).append((child, name))
            else:
                plain.add(grandchild)
    uncompile_functions(module)
    return [UncompiledModule(original, places, original not in plain) for original, places in found.items()][::-1]


def uncompiled_name(key: str) -> str:
    """What a value is called where nothing is compiled."""
    return key.replace(_NAME, "")


def accept_compiled_names(root: nn.Module, compiled: Iterable[UncompiledModule]) -> None:
    """Files in which other modules were compiled are read, too. Must come before hooks that look for their weights."""
    for module in [root, *(one.module for one in compiled)]:
        module.register_load_state_dict_pre_hook(_without_names)


def save_compiled_names(compiled: Iterable[UncompiledModule]) -> None:
    """State dicts call what is in these modules as if they were compiled. Must come after hooks that look for their
    weights."""
    for module, places, everywhere in compiled:
        for owner, inner in [(module, "")] if everywhere else [(parent, f"{name}.") for parent, name in places]:
            owner.register_state_dict_post_hook(partial(_with_names, inner))  # torch leaves a mark on the function


def _without_names(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and _NAME in key[len(prefix) :]]:
        state[prefix + uncompiled_name(key[len(prefix) :])] = state.pop(key)


def _with_names(inner: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    before = prefix + inner
    for key in [key for key in state if key.startswith(prefix)]:  # all of them: they keep their order
        named = key.startswith(before)
        state[before + _NAME + key[len(before) :] if named else key] = state.pop(key)
