"""In which modules a node was called, as nodes note it."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_zero.compat.dynamo import path_in_modules
from lightning_zero.compat.graphs import NN_MODULE_STACK

__all__ = ["Names"]


class Names:
    """Of modules in which nodes were called, from one that was traced to another.

    Args:
        old: the one, as Dynamo's variable.
        new: the other one.
    """

    def __init__(self, old: Any, new: Any) -> None:
        self._old, self._new = path_in_modules(old), path_in_modules(new)
        self._keys = _keys(old.value, new.value)

    def renamed(self, meta: dict[str, Any]) -> dict[str, Any]:
        stack = meta.get(NN_MODULE_STACK)
        if stack:
            meta[NN_MODULE_STACK] = {self._key(key): (self._path(path), kind) for key, (path, kind) in stack.items()}
        return meta

    def _key(self, key: str) -> str:
        number, at, calls = key.partition("@")
        return self._keys.get(number, number) + at + calls

    def _path(self, path: str) -> str:
        inside = path == self._old or path.startswith(self._old + ".")
        return self._new + path.removeprefix(self._old) if inside else path


def _keys(old: nn.Module, new: nn.Module) -> dict[str, str]:
    parts = zip(old.modules(), new.modules(), strict=True)
    return {str(id(one)): str(id(other)) for one, other in parts}
