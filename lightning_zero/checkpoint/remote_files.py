"""Files at URLs: resolve, download to local scratch, copy, move and remove them through fsspec.

Checkpoints are read through local files: :class:`ScratchFolder` is a temporary folder that the ranks of a host share,
and :func:`fetch_full` fills it by one download for each host.

Kept although fsspec has ``rm``, ``mv`` and ``get``. They expand names as glob patterns: ``rm`` would remove ``x1.ckpt``
for ``x[1].ckpt``. Not all file systems replace a file in ``mv``, or raise if they do not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from lightning_zero.checkpoint.atomic import COPY_BYTES, REPLACED
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import CheckpointError

HTTP = ("http://", "https://")
# Keys of fsspec's info() that change if a file is replaced; not the time of its last access.
IDENTITY_KEYS = {"size", "etag", "generation", "version_id", "blob_id", "md5hash", "crc32c"}
IDENTITY_KEYS |= {"lastmodified", "last_modified", "modified", "last_write_time", "mtime", "created", "updated"}

OnBytes = Callable[[int], None]
MakeProgress = Callable[[int], AbstractContextManager[OnBytes]]


def resolve_url(path: str | Path, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system of a path or URL, and the path in it.

    A name with ``::`` and without ``://`` is a local file: fsspec would take it for a chain of URLs.
    """
    text = str(path)
    if "::" in text and "://" not in text:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    fs, place = url_to_fs(text, **options)
    return fs, str(place)


def exists(url: str) -> bool:
    """Return True if there is something at ``url`` now, ignoring fsspec's cache."""
    fs, place = resolve_url(url)
    fs.invalidate_cache()
    return bool(fs.exists(place))


def identity(url: str) -> dict[str, str]:
    """Return properties that differ if another file is at ``url``, as far as its store reports them."""
    fs, place = resolve_url(url)
    fs.invalidate_cache()  # all of it: some stores forget a name, but not the listing that has it
    return {key: str(value) for key, value in fs.info(place).items() if key.lower() in IDENTITY_KEYS}


# -- reading


class ScratchFolder:
    """A temporary folder for downloads, shared by processes of a host; the last one removes it.

    Args:
        path: of the folder that another process has made; None: make one.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path or tempfile.mkdtemp(prefix="lightning_zero-"))
        user = self.path / f".user-{uuid.uuid4().hex}"
        user.touch()
        self.release = weakref.finalize(self, _leave_scratch, self.path, user)

    @classmethod
    def shared(cls, ranks: RankTasks) -> ScratchFolder:
        """Make one folder for the ranks of each host. Collective."""
        what, leader = "make a temporary folder for a download", ranks.host_ranks[0]
        folders: list[ScratchFolder] = []

        def make() -> str | None:
            if ranks.rank != leader:
                return None
            folders.append(cls())
            return str(folders[0].path)

        def join() -> None:
            if ranks.rank != leader:
                folders.append(cls(path))

        path = ranks.run_on_all(what, make)[leader]
        ranks.run_on_all(what, join)
        return folders[0]

    def check_space(self, count: int, url: object) -> None:
        """Raise if the folder's file system has no room for ``count`` bytes."""
        free = shutil.disk_usage(self.path).free
        if free < count:
            raise CheckpointError(
                f"{url} must be downloaded, and has {format_bytes(count)}. {self.path.parent} has "
                f"{format_bytes(free)} free. Set TMPDIR to a folder with more space, or download the checkpoint."
            )

    def download(self, fs: Any, place: str, name: str, on_read: OnBytes = lambda count: None) -> Path:
        """Copy a file into the folder, unless it is there, and return its path."""
        target = self.path / name
        if not target.exists():
            work = self.path / f"{name}.{uuid.uuid4().hex}"
            with fs.open(place, "rb") as source, open(work, "wb") as file:
                while data := source.read(COPY_BYTES):
                    file.write(data)
                    on_read(len(data))
            os.replace(work, target)
        return target


def _leave_scratch(folder: Path, user: Path) -> None:
    with suppress(OSError):
        user.unlink()
        if not any(folder.glob(".user-*")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fetch_full(url: str, ranks: RankTasks, progress: MakeProgress) -> Iterator[Path]:
    """Download a full checkpoint to each host, and remove the copy at the end. Collective.

    Args:
        progress: returns a context of a function that is called with bytes, from the total bytes.

    Raises:
        CheckpointError: on every rank: it cannot be downloaded, or was replaced in the meantime.
    """
    folder = ScratchFolder.shared(ranks)

    def fetch() -> dict[str, str] | None:
        if ranks.rank != ranks.host_ranks[0]:
            return None
        found = identity(url)
        size = int(found["size"])
        folder.check_space(size, url)
        with progress(size) as on_read:
            path = folder.download(*resolve_url(url), "checkpoint", on_read)
        if identity(url) != found or path.stat().st_size != size:
            raise replaced_error(url)
        return found

    try:
        seen = [found for found in ranks.run_on_all(f"download {url}", fetch) if found is not None]
        if any(found != seen[0] for found in seen):
            raise replaced_error(url)
        yield folder.path / "checkpoint"
    finally:
        folder.release()


def replaced_error(url: object) -> CheckpointError:
    """Return the error of a load during which the file was replaced."""
    return CheckpointError(f"{url} was replaced by another one while it was being loaded. Load it again.")


def download_http(url: str, ranks: RankTasks) -> Path:
    """Download a file to where torch.hub keeps them, once for each host, and return its path. Collective.

    Raises:
        CheckpointError: on every rank, if it cannot be downloaded.
    """
    name = Path(urlparse(url).path)
    # Two trainings may each have a last.ckpt, so the name alone is not unique.
    digest = hashlib.blake2s(url.encode()).hexdigest()[:16]
    path = Path(torch.hub.get_dir()) / "checkpoints" / f"{name.stem}-{digest}{name.suffix}"

    def fetch() -> None:
        if ranks.rank == ranks.host_ranks[0] and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), progress=False)

    ranks.run_on_all(f"download {url}", fetch)
    return path


# -- writing


def remove_tree(fs: Any, place: str) -> None:
    """Remove a file, a folder with its content, or both: object stores may have both under one name."""
    if not any(sign in place for sign in "*?["):  # then object stores remove many files in one request
        fs.rm(place, recursive=True)
        return
    if not fs.exists(place):
        raise FileNotFoundError(place)
    remove_within(fs, place)
    fs.invalidate_cache()
    if fs.isfile(place):
        fs.rm_file(place)


def remove_within(fs: Any, place: str) -> None:
    """Remove a folder, but no object of the same name."""
    fs.invalidate_cache()
    content = fs.find(place, withdirs=True, detail=True)
    for name, about in sorted(content.items(), reverse=True):  # the content of a folder is sorted after the folder
        if name.rstrip("/") == place:
            continue
        if about["type"] == "directory":
            _remove_folder(fs, name)
        else:
            fs.rm_file(name)
    _remove_folder(fs, place)


def copy_file(fs: Any, one: str, other: str) -> None:
    """Copy a file, through this host if the file system cannot."""
    try:
        fs.cp_file(one, other)
    except NotImplementedError:
        with fs.open(one, "rb") as source, fs.open(other, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)


def move_file(fs: Any, one: str, other: str) -> None:
    """Move a file, and replace one at ``other``. On an error the file at ``other`` remains."""
    if type(fs).mv is AbstractFileSystem.mv:
        copy_file(fs, one, other)
        fs.rm_file(one)
        return
    if not fs.exists(other):
        _rename(fs, one, other)
        return
    refused: Exception | None = None
    try:
        fs.mv(one, other)
    except Exception as error:  # stores raise their own
        refused = error
    if not _exists(fs, one):
        return
    # Not all replace a file: SMB raises, and WebHDFS refuses in a response that fsspec does not read.
    if not _exists(fs, other):
        raise refused or _not_renamed_error(one, other)
    old = f"{other}{REPLACED}"
    if _exists(fs, old):
        fs.rm_file(old)
    _rename(fs, other, old)
    try:
        _rename(fs, one, other)
    except BaseException:
        _rename(fs, old, other)
        raise
    fs.rm_file(old)


def _rename(fs: Any, one: str, other: str) -> None:
    fs.mv(one, other)
    if _exists(fs, one):
        raise _not_renamed_error(one, other)


def _exists(fs: Any, place: str) -> bool:
    fs.invalidate_cache()
    return bool(fs.exists(place))


def _not_renamed_error(one: str, other: str) -> OSError:
    return OSError(f"the file system has not renamed {one} to {other}, and does not say why")


def _remove_folder(fs: Any, name: str) -> None:
    # Some stores have no folders, and another process may have added files.
    with suppress(OSError, NotImplementedError):
        fs.rmdir(name)
