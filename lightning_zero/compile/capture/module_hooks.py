"""Which hooks the modules have that are compiled, and whether Dynamo has to guard them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero.compat.compiler import dynamo_config

__all__ = ["ModuleHooks", "guard_hooks", "module_hooks", "needs_hook_guards"]


class ModuleHooks:
    """Those of a module and of all in it.

    Attributes:
        all: by kind and module, and there by the handles' ids, as torch keeps them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look()
        self._known = self._keys()

    def changed(self) -> bool:
        """Whether there are others than at first. Asked before each call, so it takes a tenth of a microsecond for each
        module."""
        if _children(self._homes) != self._parts:  # modules may be put in the place of others
            self._look()
        return self._keys() != self._known

    def _look(self) -> None:
        self.all = [hooks for part in self._module.modules() for hooks in module_hooks(part)]
        self._homes = [part._modules for part in self._module.modules() if part._modules]
        self._parts = _children(self._homes)

    def _keys(self) -> list[tuple[int, ...]]:
        """Which there are: no two hooks ever have the same key."""
        return [tuple(some) for some in self.all if some]


def _children(homes: list[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    """Modules are equal only to themselves. They are held, so that no other one is ever found at the address of one."""
    return [part for home in homes for part in home.values()]


def module_hooks(module: nn.Module) -> list[dict[int, Any]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, kind) for kind in kinds]


def needs_hook_guards(root: nn.Module, left_out: Collection[Callable[..., Any]]) -> bool:
    """Whether modules of one class may differ in their hooks. Without guards for these Dynamo runs what it compiled for
    one of them for the next: layers behind a graph break in a loop, a student and its teacher.

    left_out: hooks that compiled code goes without
    """
    count = Counter(map(type, root.modules()))
    several = [part for part in root.modules() if count[type(part)] > 1]
    return any(hook not in left_out for part in several for hooks in module_hooks(part) for hook in hooks.values())


@contextmanager
def guard_hooks() -> Iterator[None]:
    """Dynamo leaves such guards out, and never calls a hook that is put on a module once it is compiled, but goes on
    calling one that is removed. They take twice the time of all others, so there are none before hooks change."""
    before = dynamo_config.skip_nnmodule_hook_guards
    dynamo_config.skip_nnmodule_hook_guards = False
    try:
        yield
    finally:
        dynamo_config.skip_nnmodule_hook_guards = before
