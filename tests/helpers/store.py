"""An object store in this process's memory, with the habits of real ones that wreck checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

__all__ = ["Store", "storing"]


class _Object(AbstractBufferedFile):
    """Uploaded in parts; there when it is committed. As long as was listed when it was opened for reading."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if Store.fails_after is not None and len(self.parts) >= Store.fails_after:
            raise OSError("throttled")
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.pipe_file(self.path, b"".join(self.parts))

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


class Store(AbstractFileSystem):
    """An object store: no folders, no renames, and objects appear complete.

    An object may have the name of a prefix of others. Each thread remembers its own lists. Functions for several
    objects take names as patterns.

    Attributes:
        objects: by their names.
        versions: of each, which distinguish it from earlier ones.
        fails_after: so many parts of an upload; None: never.
        gives: returns the bytes that a read gets.
    """

    protocol = ("stored", "s3")
    objects: dict[str, bytes] = {}
    versions: dict[str, int] = {}
    fails_after: int | None = None
    gives: Callable[[str, bytes], bytes] = staticmethod(lambda path, data: data)
    _numbers = itertools.count()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Object(self, path, mode, block_size=1 << 16, autocommit=options["autocommit"])

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        known = self._ls_from_cache(path)
        if known is not None:
            return next((one for one in known if one["name"] == path), _folder(path))
        return self._entry(path)

    def _entry(self, path: str) -> dict[str, Any]:
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file", "ETag": self.versions[path]}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return _folder(path)
        raise FileNotFoundError(path)

    def modified(self, path: str) -> datetime:
        self.info(path)
        return datetime.fromtimestamp(self.versions[self._strip_protocol(path)])

    def isdir(self, path: str) -> bool:
        path = self._strip_protocol(path)
        if path in self.dircache:
            return any(one["name"] != path for one in self.dircache[path])
        return any(name.startswith(f"{path}/") for name in self.objects)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            inside = [name for name in self.objects if name.startswith(f"{path}/")] or [self._entry(path)["name"]]
            names = {"/".join(name.split("/")[: path.count("/") + 2]): None for name in inside}
            self.dircache[path] = [self._entry(name) for name in names]
        found = self.dircache[path]
        return found if detail else [one["name"] for one in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Apply to one name, not to the list that contains it."""
        if path is None:
            self.dircache.clear()
        else:
            self.dircache.pop(self._strip_protocol(path), None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return type(self).gives(path, self.objects[path][start:end])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        self.objects[path], self.versions[path] = bytes(value), next(self._numbers)
        self.dircache.clear()

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.pipe_file(path2, self.objects[self._strip_protocol(path1)])

    def rm_file(self, path: str) -> None:
        self.objects.pop(self._strip_protocol(path), None)
        self.dircache.clear()

    _rm = rm_file

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        pass


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


@contextmanager
def storing() -> Iterator[None]:
    """``stored://`` is there, empty at first."""
    fsspec.register_implementation("stored", Store, clobber=True)
    yield
    Store.objects.clear()
    Store.fails_after, Store.gives = None, staticmethod(lambda path, data: data)  # type: ignore[assignment]
    Store.clear_instance_cache()
