"""Places that only fsspec reaches, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["Counted", "Mounted", "counting", "mount", "stored"]


class Mounted(DirFileSystem):
    """A folder that only fsspec knows."""

    protocol = "mounted"
    home = "/"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(path=self.home, fs=LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return [cls._strip_protocol(one) for one in path] if isinstance(path, list) else str(path).split("://")[-1]


def mount(home: Path | str) -> None:
    """From now on ``mounted://`` is that folder."""
    Mounted.home = str(home)
    fsspec.register_implementation("mounted", Mounted, clobber=True)


def _opened(memory: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
    """Return a file of its own for each reader.

    fsspec returns one for all, whose position they share: ranks that are threads would read each other's rest.
    """
    found = _open(memory, path, mode, **options)
    return BytesIO(found.getvalue()) if mode == "rb" else found


_open = MemoryFileSystem._open


@contextmanager
def stored() -> Iterator[None]:
    """``memory://`` is there, empty at first, and may be read by several threads."""
    with patch.object(MemoryFileSystem, "_open", _opened):
        try:
            _empty(MemoryFileSystem)
            yield
        finally:
            _empty(MemoryFileSystem)


def _empty(memory: type[MemoryFileSystem]) -> None:
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


class Counted(MemoryFileSystem):
    """Notes how many bytes each read gets.

    Attributes:
        read: of reads out of files whose names end as is asked for.
    """

    protocol = "counted"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    read: list[int] = []
    ending = ""
    _open = _opened

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **options)
        if path.endswith(self.ending):
            self.read.append(len(data))
        return data


@contextmanager
def counting(ending: str = "") -> Iterator[None]:
    """``counted://`` is there, empty at first."""
    Counted.ending = ending
    fsspec.register_implementation("counted", Counted, clobber=True)
    yield
    _empty(Counted)
    Counted.read.clear()
