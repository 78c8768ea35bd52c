"""The folder of a checkpoint while it is written: beside the place where it belongs, until one rename puts it there.

Protocol: one rank calls :meth:`~LocalFolder.begin`; then any rank :meth:`~LocalFolder.create`, for files of different
names; then the one rank :meth:`~LocalFolder.commit`, or :meth:`~LocalFolder.discard`. Whoever dies in between leaves
what stood there before, and a folder ``NAME.incomplete``, which the next save to the same place removes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.claim import PATIENCE_S, concurrent_save_error, unclaimed
from lightning_zero.checkpoint.exactly import copy_file, remove_tree
from lightning_zero.checkpoint.held import PinnedDirectory
from lightning_zero.checkpoint.lateness import refresh_listing
from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.places import (
    INCOMPLETE,
    beside,
    restore_replaced,
    make_folders,
    replace_atomically,
    remove,
    remove_leftover,
    standing,
    sync_folder,
)
from lightning_zero.checkpoint.replaceable import check_replaceable_folder, check_replaceable
from lightning_zero.checkpoint.sharded.manifest import MANIFEST, Manifest
from lightning_zero.errors import CheckpointError

__all__ = ["Folder", "save_folder_at", "full_path", "is_complete", "readable_location", "remove_checkpoint_at", "settle"]

TOKEN = ".save_id"
BLOCK = 16 << 20  # bytes
# What systems say that know no links, from one mount to another, or no more of a file.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class Folder(Protocol):
    """Where a checkpoint is written."""

    def begin(self, token: str) -> None:
        """Makes room for the files of a save, whose id is ``token``. One rank."""

    def sees(self, token: str) -> bool:
        """Whether this rank sees what :meth:`begin` has made on another; maybe not yet."""

    def create(self, name: str) -> BinaryIO:
        """A new file, open for writing."""

    def commit(self) -> None:
        """Puts it where it belongs, in place of what stands there. One rank."""

    def discard(self) -> None:
        """Removes what has been written. One rank."""


def save_folder_at(path: str | Path) -> Folder:
    """On a local file system, or wherever fsspec reaches."""
    fs, place = located(path)
    return LocalFolder(Path(place)) if isinstance(fs, LocalFileSystem) else RemoteFolder(fs, place)


def full_path(path: str | Path) -> str:
    """The same from wherever this process goes."""
    fs, place = located(path)
    return str(place) if isinstance(fs, LocalFileSystem) else str(path)


def readable_location(path: str) -> tuple[Any, str]:
    """The file system, and the place in it, where the checkpoint of that name is read: also that of a save that was
    killed after it had been complete, and before it stood in its place."""
    fs, place = located(path)
    if isinstance(fs, LocalFileSystem):
        return fs, str(standing(Path(place)))
    fs.invalidate_cache()  # other processes have written since this one has looked
    beside = f"{place.rstrip('/')}{INCOMPLETE}"
    return fs, beside if is_complete(fs, beside) else place


def remove_checkpoint_at(path: str | Path) -> None:
    """Removes the checkpoint of that name, of either kind, and what a save to it has left; if anything is there."""
    fs, place = located(path)
    if isinstance(fs, LocalFileSystem):
        remove(Path(place))
        return
    place = place.rstrip("/")
    for one in (place, f"{place}{INCOMPLETE}"):
        fs.invalidate_cache()
        if fs.exists(one):
            remove_tree(fs, one)


class LocalFolder:
    """On a file system of this host, or one that all hosts mount."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._work = beside(path, INCOMPLETE)
        self._begun: PinnedDirectory | None = None  # by this rank
        self._held: PinnedDirectory | None = None  # also if another rank has begun

    def begin(self, token: str) -> None:
        with unclaimed(self._work, self._path):
            restore_replaced(self._path)
            check_replaceable_folder(self._path)
            remove_leftover(self._path, INCOMPLETE)
        make_folders(self._path.parent)
        try:
            self._work.mkdir()
        except FileExistsError:
            raise concurrent_save_error(self._path) from None
        held = PinnedDirectory(self._work)
        if not held.claim(PATIENCE_S) or not held.is_at(self._work):
            raise concurrent_save_error(self._path)
        self._held = self._begun = held
        with self._in_folder():
            (self._place / TOKEN).write_text(token)

    def sees(self, token: str) -> bool:
        if self._begun is not None:
            self._look()
        held = PinnedDirectory(self._work)
        with suppress(OSError):
            if (Path(held.path) / TOKEN).read_text() == token:
                self._held = self._held or held
                return True
        refresh_listing(self._path.parent)
        return False

    def create(self, name: str) -> BinaryIO:
        with self._in_folder():
            try:
                return open(self._place / name, "xb", buffering=0)
            except FileExistsError:  # without locks two saves may have begun in one folder
                raise _another_save(self._path) from None

    @property
    def _place(self) -> Path:
        """Leads to the folder of this save, and never to that of another one under its name."""
        return self._work if self._held is None else Path(self._held.path)

    @contextmanager
    def _in_folder(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:  # the folder itself is gone
            raise _another_save(self._path) from error

    def link(self, name: str, file: Path, may_copy: bool) -> bool:
        """Another name for a file that is complete and that nobody changes any more, or a copy; False where neither
        may be."""
        try:
            with self._in_folder():
                os.link(file, self._place / name)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not may_copy:
                return False
            with open(file, "rb") as given, self.create(name) as copy:
                shutil.copyfileobj(given, copy, BLOCK)
                os.fsync(copy.fileno())
        return True

    def commit(self) -> None:
        self._look()
        with self._in_folder():
            (self._place / TOKEN).unlink()
            sync_folder(self._work)
        self._look()
        replace_atomically(self._work, self._path)
        self._release()

    def discard(self) -> None:
        try:
            if self._is_ours():
                remove(self._work)
        finally:
            self._release()

    def _release(self) -> None:
        if self._begun is not None:
            self._begun.release()

    def _is_ours(self) -> bool:
        return self._begun is not None and self._begun.is_at(self._work)

    def _look(self) -> None:
        if not self._is_ours():
            raise _another_save(self._path)


class RemoteFolder:
    """In an object store, or on what else has no rename: the manifest, which is written last, makes it a checkpoint.

    Where a checkpoint already stands, it is written beside, and is complete as soon as the token is gone: readers then
    take it from there (:func:`readable_location`), until it has been copied to its place. Whoever dies meanwhile leaves it there,
    and the next save to the same place copies it first."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path.rstrip("/")
        self._work = self._path
        self._begun = self._committed = False
        self._token: str | None = None

    def begin(self, token: str) -> None:
        self._token = token
        self._fs.invalidate_cache()
        check_replaceable(self._path, self._names(self._path))
        settle(self._fs, self._path)
        if self._fs.exists(f"{self._path}/{TOKEN}"):  # of a save that was killed
            remove_tree(self._fs, self._path)
        self._work = f"{self._path}{INCOMPLETE}" if self._fs.exists(self._path) else self._path
        self._fs.makedirs(self._work, exist_ok=True)
        self._fs.pipe_file(f"{self._work}/{TOKEN}", token.encode())
        self._begun = True

    def sees(self, token: str) -> bool:
        self._fs.invalidate_cache()
        for work in (f"{self._path}{INCOMPLETE}", self._path):
            with suppress(OSError):
                if self._fs.cat_file(f"{work}/{TOKEN}") == token.encode():
                    self._work, self._token = work, token
                    return True
        return False

    def create(self, name: str) -> BinaryIO:
        if self._token is not None and not self._is_ours():  # else this one's files would come among another's
            raise _another_save(self._path)
        file: BinaryIO = self._fs.open(f"{self._work}/{name}", "wb")
        return file

    def commit(self) -> None:
        if self._token is not None and not self._is_ours():
            raise _another_save(self._path)
        self._fs.rm_file(f"{self._work}/{TOKEN}")
        self._committed = True
        if self._work != self._path:
            _move(self._fs, self._work, self._path)

    def discard(self) -> None:
        # Else somebody has died who was not needed, a copy failed, or another save has been there.
        if self._begun and not self._committed and self._is_ours():
            with suppress(FileNotFoundError):
                remove_tree(self._fs, self._work)

    def _is_ours(self) -> bool:
        with suppress(OSError):
            return bool(self._fs.cat_file(f"{self._work}/{TOKEN}") == str(self._token).encode())
        return False

    def _names(self, place: str) -> list[str]:
        entries = self._fs.ls(place, detail=False) if self._fs.isdir(place) else []
        return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries]


def settle(fs: Any, path: str) -> None:
    """Puts what stands beside ``path`` there, where a save was killed after it had been complete, and readers take it
    for what is there; removes it, where one was killed before."""
    beside = f"{path}{INCOMPLETE}"
    fs.invalidate_cache()
    if is_complete(fs, beside):
        _move(fs, beside, path)
    elif fs.exists(beside):
        remove_tree(fs, beside)


def _move(fs: Any, work: str, path: str) -> None:
    # What a store lists may lack files, and what is copied is removed afterwards.
    manifest = Manifest.from_bytes(fs.cat_file(f"{work}/{MANIFEST}"), f"{work}/{MANIFEST}")
    with suppress(FileNotFoundError):
        remove_tree(fs, path)
    fs.makedirs(path, exist_ok=True)
    for name in (*manifest.files, MANIFEST):
        copy_file(fs, f"{work}/{name}", f"{path}/{name}")
    fs.rm_file(f"{work}/{MANIFEST}")  # first, or what is left of it would still look complete
    remove_tree(fs, work)


def is_complete(fs: Any, place: str) -> bool:
    """Whether a whole sharded checkpoint is there."""
    return bool(fs.exists(f"{place}/{MANIFEST}") and not fs.exists(f"{place}/{TOKEN}"))


def _another_save(path: Path | str) -> CheckpointError:
    return CheckpointError(
        f"another save to {path} has begun meanwhile, and taken its folder. What stood there is still there. Let each "
        "training save to a place of its own."
    )
