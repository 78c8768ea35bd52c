"""Where Dynamo reads values from: the same path from another layer."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, cast

from lightning_zero.compat.dynamo import ChainedSource, Source, value_at
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike

__all__ = ["Moved", "begins_at", "parts_of"]


def begins_at(path: Source, module: Source) -> bool:
    """Whether it goes on from there, or is the same."""
    while path != module:
        if not isinstance(path, ChainedSource):
            return False
        path = path.base
    return True


class Moved:
    """Paths that begin at one module, moved to another.

    Args:
        tx: reads what is there.
        old: the module that they begin at.
        new: the other one.
    """

    def __init__(self, tx: Any, old: Source, new: Source) -> None:
        self._old, self._new = old, new
        root = tx.output.root_tx
        self._names = {"G": root.f_globals, "L": root.f_locals}
        self._paths: dict[Source, Source] = {}
        self._values: dict[Source, Any] = {}

    def to(self, path: Source) -> Source:
        """The path itself where it does not begin at the old module."""
        found = self._paths.get(path)
        if found is None:
            found = self._paths[path] = self._new if path == self._old else self._parts_moved(path)
        return found

    def _parts_moved(self, path: Source) -> Source:
        if not isinstance(path, ChainedSource):
            return path
        changed = {}
        for name, part in parts_of(path):
            if isinstance(part, Source) and (moved := self.to(part)) is not part:
                changed[name] = moved
        return replace(path, **changed) if changed else path

    def value(self, path: Source) -> Any:
        """
        Raises:
            Unlike: there is nothing.
        """
        try:
            return value_at(path, self._names, self._values)
        except Exception as error:  # paths are code, which may raise anything
            raise Unlike(f"there is nothing at {path.name}") from error


def parts_of(path: Source) -> list[tuple[str, Any]]:
    """What it is made of, by names: its base, and in some an index, which may be a path, too."""
    return [(name, getattr(path, name)) for name in _names(cast(Any, type(path)))]


@lru_cache(256)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind))
