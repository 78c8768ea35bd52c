"""Detect hooks of compiled modules, and decide whether Dynamo guards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero.compat.compiler import dynamo_config


class ModuleHooks:
    """Hooks of a module and its submodules.

    Attributes:
        all: torch's own dicts of hooks by handle id, for each kind and module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._update()
        self._initial = self._keys()

    def changed(self) -> bool:
        """Return True if hooks differ from those at construction. Called before each call; 0.1 us per module."""
        if _submodules_in(self._containers) != self._submodules:  # submodules may have been replaced
            self._update()
        return self._keys() != self._initial

    def _update(self) -> None:
        self.all = [hooks for part in self._module.modules() for hooks in module_hooks(part)]
        self._containers = [part._modules for part in self._module.modules() if part._modules]
        self._submodules = _submodules_in(self._containers)

    def _keys(self) -> list[tuple[int, ...]]:
        """Return the ids of all hooks; torch never reuses an id."""
        return [tuple(some) for some in self.all if some]


def _submodules_in(containers: list[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    """Return submodules. They compare by identity, and references keep their addresses unique."""
    return [part for container in containers for part in container.values()]


def module_hooks(module: nn.Module) -> list[dict[int, Any]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, kind) for kind in kinds]


def needs_hook_guards(root: nn.Module, ignored: Collection[Callable[..., Any]]) -> bool:
    """Return True if modules of one class may differ in hooks.

    Without guards Dynamo would run code compiled for one of them for the next: layers after a graph break in a loop, or
    a student and its teacher.
    """
    count = Counter(map(type, root.modules()))
    several = [part for part in root.modules() if count[type(part)] > 1]
    return any(hook not in ignored for part in several for hooks in module_hooks(part) for hook in hooks.values())


@contextmanager
def guard_hooks() -> Iterator[None]:
    """Return a context in which Dynamo guards hooks.

    Otherwise it never calls a hook added after compilation, and keeps calling a removed one. These guards take twice
    the time of all others, so they are used only once hooks change.
    """
    before = dynamo_config.skip_nnmodule_hook_guards
    dynamo_config.skip_nnmodule_hook_guards = False
    try:
        yield
    finally:
        dynamo_config.skip_nnmodule_hook_guards = before
