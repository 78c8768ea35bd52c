"""Places that only fsspec reaches, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["Counted", "Mounted", "counting", "mount"]


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
    Counted.store.clear()
    Counted.pseudo_dirs[:] = [""]
    Counted.read.clear()
