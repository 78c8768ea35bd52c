"""The folder of a sharded checkpoint while it is written, and the manifest that makes it complete.

Rank 0 calls ``begin``; then any rank ``create``, for different names; then rank 0 ``commit`` or ``discard``. A process
that dies in between leaves the previous checkpoint, and a folder ``NAME.incomplete`` that the next save to the same
path removes. ``manifest.json`` is written last: it has names, sizes and checksums of all other files. A folder of ours
without it, or with one that does not match, is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.atomic import (
    INCOMPLETE,
    LOCK_TIMEOUT_S,
    PinnedDirectory,
    check_replaceable,
    check_replaceable_folder,
    concurrent_save_error,
    make_folders,
    readable_path,
    refresh_listing,
    remove,
    removing_leftover,
    replace_atomically,
    restore_replaced,
    sibling_path,
    sync_folder,
    taken_error,
)
from lightning_zero.checkpoint.integrity import FileChecksum, digest_of, parse_json
from lightning_zero.checkpoint.remote_files import copy_file, remove_tree, resolve_url
from lightning_zero.errors import CheckpointError
from lightning_zero.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1
TOKEN = ".save_id"  # marks a save in progress

OnProgress = Callable[[int], None]


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint folder.

    Attributes:
        save_id: of the save that wrote all files; ``.metadata`` has it, too.
        world_size: number of ranks that wrote them.
        format: of the folder; a reader knows formats up to its own.
    """

    save_id: str
    world_size: int
    files: Mapping[str, FileChecksum]
    written_by: str = f"lightning_zero {__version__}"
    torch: str = torch.__version__
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return JSON with a checksum of itself."""
        body = asdict(self) | {"files": {name: found.as_dict() for name, found in sorted(self.files.items())}}
        return json.dumps(body | {"xxh3_128": digest_of(_canonical(body))}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: it is damaged, of a later format, or names files outside of its folder.
        """
        try:
            body = parse_json(data)
            is_intact = body.pop("xxh3_128") == digest_of(_canonical(body))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            is_intact = False
        if not is_intact:
            raise CheckpointError(f"{path} is damaged: its own checksum does not fit. Use another checkpoint.")
        version = body.get("format")
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(f"{path} says format {version!r}, which there never was. It was not written by us.")
        if version > FORMAT:
            raise CheckpointError(
                f"{path} says format {version}, written by {body.get('written_by')}; this version "
                f"({__version__}) knows formats up to {FORMAT}. Update lightning_zero."
            )
        try:
            files = {name: FileChecksum(**entry) for name, entry in body.pop("files").items()}
            found = cls(files=files, **body)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not say what format {version} does: {error}.") from error
        if not isinstance(found.world_size, int) or not isinstance(found.save_id, str):
            raise CheckpointError(f"{path} does not say by how many ranks, and in which save, it was written.")
        for name, wanted in files.items():
            if not isinstance(wanted.bytes, int) or not isinstance(wanted.xxh3_128, str):
                raise CheckpointError(f"{path} does not say how long {name!r} is, and what its checksum is.")
            if not name or PurePosixPath(name).name != name or name in (".", "..") or "\\" in name:
                raise CheckpointError(
                    f"{path} names {name!r}, which is not a file of its folder. It was not written by us."
                )
        return found


def _canonical(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def save_folder_at(path: str | Path) -> SaveFolder:
    """Return the folder to save to at a local path or URL."""
    fs, place = resolve_url(path)
    return LocalFolder(Path(place)) if isinstance(fs, LocalFileSystem) else RemoteFolder(fs, place)


def full_path(path: str | Path) -> str:
    """Return an absolute path, or the URL: a process may change its directory later."""
    fs, place = resolve_url(path)
    return str(place) if isinstance(fs, LocalFileSystem) else str(path)


def readable_location(path: str) -> tuple[Any, str]:
    """Return the file system and the path to read a checkpoint from.

    The path differs from ``path`` if a save was killed after its files were complete and before they were in place.
    """
    fs, place = resolve_url(path)
    if isinstance(fs, LocalFileSystem):
        return fs, str(readable_path(Path(place)))
    fs.invalidate_cache()  # other processes may have written
    sibling = f"{place.rstrip('/')}{INCOMPLETE}"
    return fs, sibling if is_complete(fs, sibling) else place


def remove_checkpoint_at(path: str | Path) -> None:
    """Remove a checkpoint of either kind, and leftovers of saves to its path."""
    fs, place = resolve_url(path)
    if isinstance(fs, LocalFileSystem):
        remove(Path(place))
        return
    place = place.rstrip("/")
    for one in (place, f"{place}{INCOMPLETE}"):
        fs.invalidate_cache()
        if fs.exists(one):
            remove_tree(fs, one)


class LocalFolder:
    """A folder on a file system of this host, or one that all hosts mount."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._work = sibling_path(path, INCOMPLETE)
        self._begun: PinnedDirectory | None = None  # on the rank that called begin()
        self._pinned: PinnedDirectory | None = None  # on every rank

    def begin(self, token: str) -> None:
        """Make the folder for the save with the id ``token``. One rank."""
        with removing_leftover(self._work, self._path):
            restore_replaced(self._path)
            check_replaceable_folder(self._path)
        make_folders(self._path.parent)
        try:
            self._work.mkdir()
        except FileExistsError:
            raise concurrent_save_error(self._path) from None
        pinned = PinnedDirectory(self._work)
        if not pinned.try_lock(LOCK_TIMEOUT_S) or not pinned.is_at(self._work):
            raise concurrent_save_error(self._path)
        self._pinned = self._begun = pinned
        with self._folder_exists():
            (self._folder / TOKEN).write_text(token)

    def sees(self, token: str) -> bool:
        """Return True if this rank sees the folder of :meth:`begin` on another rank; it may show late."""
        if self._begun is not None:
            self._check_ownership()
        pinned = PinnedDirectory(self._work)
        with suppress(OSError):
            if (Path(pinned.path) / TOKEN).read_text() == token:
                self._pinned = self._pinned or pinned
                return True
        refresh_listing(self._path.parent)
        return False

    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing."""
        with self._folder_exists():
            try:
                return open(self._folder / name, "xb", buffering=0)
            except FileExistsError:  # without locks two saves may have begun in one folder
                raise taken_error(self._path) from None

    @property
    def _folder(self) -> Path:
        """The folder of this save, even if another save has its name now."""
        return self._work if self._pinned is None else Path(self._pinned.path)

    @contextmanager
    def _folder_exists(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:  # the folder itself is gone
            raise taken_error(self._path) from error

    def commit(self, on_progress: OnProgress = lambda count: None) -> None:
        """Put the folder in place of the previous checkpoint. One rank."""
        self._check_ownership()
        with self._folder_exists():
            (self._folder / TOKEN).unlink()
            sync_folder(self._work)
        self._check_ownership()
        replace_atomically(self._work, self._path)
        self._unlock()

    def discard(self) -> None:
        """Remove the written files. One rank."""
        try:
            if self._is_ours():
                remove(self._work)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._begun is not None:
            self._begun.unlock()

    def _is_ours(self) -> bool:
        return self._begun is not None and self._begun.is_at(self._work)

    def _check_ownership(self) -> None:
        if not self._is_ours():
            raise taken_error(self._path)


class RemoteFolder:
    """A folder in an object store, or on another file system without rename.

    The manifest makes it a checkpoint. If a checkpoint exists, a save writes to a sibling folder. That is complete
    when the token is removed: readers then use it (:func:`readable_location`) until it has been copied to its path. If
    the process dies meanwhile, the next save to the path completes the copy.
    """

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path.rstrip("/")
        self._work = self._path
        self._begun = self._committed = False
        self._token: str | None = None

    def begin(self, token: str) -> None:
        self._token = token
        self._fs.invalidate_cache()
        check_replaceable(self._path, self._names(self._path))
        finish_interrupted_save(self._fs, self._path)
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
        if self._token is not None and not self._is_ours():  # else files of two saves would mix
            raise taken_error(self._path)
        file: BinaryIO = self._fs.open(f"{self._work}/{name}", "wb")
        return file

    def commit(self, on_progress: OnProgress = lambda count: None) -> None:
        if self._token is not None and not self._is_ours():
            raise taken_error(self._path)
        self._fs.rm_file(f"{self._work}/{TOKEN}")
        self._committed = True
        if self._work != self._path:
            _move(self._fs, self._work, self._path, on_progress)

    def discard(self) -> None:
        # After the token is gone the files are a checkpoint, even if the copy to its path has failed.
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


SaveFolder = LocalFolder | RemoteFolder


def finish_interrupted_save(fs: Any, path: str) -> None:
    """Complete or remove a killed save to ``path``: move it there if its files are complete."""
    work = f"{path}{INCOMPLETE}"
    fs.invalidate_cache()
    if is_complete(fs, work):
        _move(fs, work, path)
    elif fs.exists(work):
        remove_tree(fs, work)


def _move(fs: Any, work: str, path: str, on_progress: OnProgress = lambda count: None) -> None:
    # The manifest names all files; a listing may lack some, and the originals are removed afterwards.
    manifest = Manifest.from_bytes(fs.cat_file(f"{work}/{MANIFEST}"), f"{work}/{MANIFEST}")
    with suppress(FileNotFoundError):
        remove_tree(fs, path)
    fs.makedirs(path, exist_ok=True)
    for name in (*manifest.files, MANIFEST):
        copy_file(fs, f"{work}/{name}", f"{path}/{name}")
        on_progress(0)
    fs.rm_file(f"{work}/{MANIFEST}")  # first: the remaining files must not look complete
    remove_tree(fs, work)


def is_complete(fs: Any, place: str) -> bool:
    """Return True if ``place`` is a complete sharded checkpoint of ours."""
    return bool(fs.exists(f"{place}/{MANIFEST}") and not fs.exists(f"{place}/{TOKEN}"))
