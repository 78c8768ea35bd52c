"""Replace files and folders atomically, and keep concurrent saves to one path apart.

A save writes to a sibling path (:func:`sibling_path`) and :func:`replace_atomically` puts it in place, so a process
that dies at any moment leaves the previous checkpoint. :func:`try_lock` and :class:`PinnedDirectory` detect another
save to the same path. A file system without locks grants every lock; the save then finds at its end that its files are
gone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from lightning_zero.errors import CheckpointError

INCOMPLETE = ".incomplete"  # a save in progress, or one that was killed
REPLACED = ".replaced"  # the previous checkpoint while two renames replace it
COPY_BYTES = 16 << 20  # of a copy of a remote file, in memory at a time
MAX_NAME_BYTES, NAME_PREFIX = 255, 40  # bytes of a file name; characters of a shortened one, of up to 4 bytes each

LOCK_TIMEOUT_S = 5.0  # for a file that this save has just created: another save tests its lock within microseconds
LOCK_POLL_S = 0.005
VISIBLE_TIMEOUT_S = 10.0  # longer than NFS clients cache negative entries
FIRST_POLL_S, MAX_POLL_S = 0.01, 0.5

# Each folder that is a checkpoint, complete or not, holds one of these: torch's, Lightning's, DeepSpeed's and ours.
CHECKPOINT_FILES = (".metadata", "meta.pt", "*.distcp", ".save_id", "*_model_states.pt")
# Files that Lightning's DeepSpeedStrategy adds; other folders may have files of these names, too.
DEEPSPEED_FILES = {"latest", "checkpoint", "zero_to_fp32.py"}


def sibling_path(path: Path, ending: str) -> Path:
    """Return ``path`` with ``ending`` appended, with a shortened name if the file system would refuse it."""
    name = path.name + ending
    if len(os.fsencode(name)) > MAX_NAME_BYTES >= len(os.fsencode(path.name)):
        digest = hashlib.blake2s(os.fsencode(path.name)).hexdigest()[:32]
        name = f"{path.name[:NAME_PREFIX]}-{digest}{ending}"
    return path.with_name(name)


def replace_atomically(work: Path, path: Path) -> None:
    """Move the finished file or folder ``work`` to ``path`` and remove the previous content of ``path``.

    The content of ``work`` must be on the disk; its name is on the disk when this returns. On an error nothing has
    changed.

    Raises:
        CheckpointError: The file system cannot rename within this folder.
    """
    try:
        _replace(work, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise CheckpointError(
            f"{path.parent} cannot rename {work.name} to {path.name} ({error.strerror}): one of them is on another "
            "file system, or in another layer of a union file system (overlayfs, mergerfs). Save to a folder on one "
            "file system, such as a local disk or a volume that is mounted into the container."
        ) from error


def _replace(work: Path, path: Path) -> None:
    if not os.path.lexists(path):
        os.rename(work, path)
        _sync_or(lambda: os.rename(path, work), path.parent)
        return
    with _opened(path) as (_, previous):
        if previous is not None:
            try_lock(previous)  # else another save would take it for a leftover, and remove it at the same time
        if exchange(work, path):
            _sync_or(lambda: exchange(work, path), path.parent)
            if previous is None or is_at(work, previous):
                _remove_quietly(work)
        elif not any(_is_folder(one) for one in (work, path)):
            os.replace(work, path)
            sync_folder(path.parent)
        else:
            old = sibling_path(path, REPLACED)
            remove(old)
            os.rename(path, old)
            try:
                os.rename(work, path)
            except OSError:
                os.rename(old, path)
                raise
            sync_folder(path.parent)
            _remove_quietly(old)


def restore_replaced(path: Path) -> None:
    """Clean up after a process that died in :func:`replace_atomically`.

    Between its two renames, the previous content moves back to ``path``; after them, the previous content is removed.

    Raises:
        CheckpointError: the process has not died, and is removing the previous content.
    """
    old = sibling_path(path, REPLACED)
    if readable_path(path) == old:
        with _without_locks(path):
            os.rename(old, path)
    else:
        with removing_leftover(old, path):
            pass


def readable_path(path: Path) -> Path:
    """Return ``path``, or its sibling that holds the checkpoint if a process died between two renames."""
    old = sibling_path(path, REPLACED)
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def _sync_or(undo: Callable[[], object], parent: Path) -> None:
    try:
        sync_folder(parent)
    except OSError:
        undo()
        raise


def _remove_quietly(path: Path) -> None:
    # The new checkpoint is complete, so the save has not failed. The next save tries again, and raises.
    with suppress(OSError):
        remove(path)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; return False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    if rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, but not the content of its files."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_folders(path: Path) -> None:
    """Create the folder and its missing parents, and flush their names to the disk."""
    missing = [path, *path.parents]
    missing = missing[: next(number for number, folder in enumerate(missing) if folder.is_dir())]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# -- checks and locks


def check_replaceable_folder(path: Path) -> None:
    """Raise if ``path`` is a folder that a checkpoint must not replace."""
    if path.is_dir() and not path.is_symlink():
        check_replaceable(str(path), os.listdir(path))


def check_replaceable(path: str, names: Iterable[str]) -> None:
    """Raise if a folder with the entries ``names`` is neither empty nor a checkpoint.

    Raises:
        CheckpointError: a checkpoint saved at ``path`` would remove other files.
    """
    found = sorted(names)
    known = any(fnmatch(name, pattern) for name in found for pattern in CHECKPOINT_FILES)
    if found and not known and not DEEPSPEED_FILES.issuperset(found):
        raise CheckpointError(
            f"{path} is a folder without a checkpoint: it holds {', '.join(map(repr, found[:3]))}"
            f"{f' and {len(found) - 3} more' if len(found) > 3 else ''}. A checkpoint saved there would replace the "
            "folder. Give the checkpoint its own name in that folder, or remove the folder first."
        )


def try_lock(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Lock an open file or folder until it is closed; return False if another save has locked it.

    Args:
        descriptor: of the file or folder.
        timeout_s: how long to retry. Another save that tests the lock holds it for a moment.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)
        except OSError:  # the file system has no locks
            return True


def unlock(descriptor: int) -> None:
    """Unlock it, even if a process forked in the meantime has inherited the descriptor."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def removing_leftover(work: Path, path: object) -> Iterator[None]:
    """Hold the lock of ``work``, a leftover of a save to ``path``, and remove it at the end.

    Only the file or folder that is locked is removed: if another save has made a new one at ``work``, that one stays.

    Raises:
        CheckpointError: another save holds the lock.
    """
    with _opened(work) as (exists, descriptor):
        if descriptor is not None and not try_lock(descriptor):
            raise concurrent_save_error(path)
        yield
        with _without_locks(path):
            if exists and (descriptor is None or is_at(work, descriptor)):
                remove(work)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[bool, int | None]]:
    """Open a file or folder, and yield whether it exists, and its descriptor.

    A symbolic link, and what this user may not open, have no descriptor.
    """
    exists, descriptor = True, None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    except OSError:
        pass
    try:
        yield exists, descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def _without_locks(path: object) -> Iterator[None]:
    """Name another save to ``path`` that changes files during their removal, if locks did not stop it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
            raise
        raise concurrent_save_error(path) from error


def is_at(path: Path, descriptor: int) -> bool:
    """Return True if ``path`` still is the file or folder that was opened as ``descriptor``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def concurrent_save_error(path: object) -> CheckpointError:
    """Return the error of a save that finds another save to ``path`` in progress."""
    return CheckpointError(
        f"another save to {path} is running, and this one has written nothing. Wait until the other save ends, or let "
        "each training save to its own path."
    )


def taken_error(path: object) -> CheckpointError:
    """Return the error of a save whose files another save to ``path`` has removed."""
    return CheckpointError(
        f"another save to {path} has begun meanwhile, and removed these files. The checkpoint before them is still "
        "there. Let each training save to its own path."
    )


class PinnedDirectory:
    """A directory that stays the same one if another process replaces it under its name.

    Attributes:
        path: leads to the directory as long as this object lives; the given name if ``/proc`` is not available.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = str(folder)
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return  # reading from it will raise
        weakref.finalize(self, os.close, self._descriptor)
        pinned = f"/proc/self/fd/{self._descriptor}"
        if os.path.isdir(pinned):
            self.path = pinned

    def try_lock(self, timeout_s: float = 0.0) -> bool:
        """Lock the directory, see :func:`try_lock`."""
        return self._descriptor is None or try_lock(self._descriptor, timeout_s)

    def unlock(self) -> None:
        if self._descriptor is not None:
            unlock(self._descriptor)

    def is_at(self, path: Path) -> bool:
        return self._descriptor is not None and is_at(path, self._descriptor)


# -- NFS


def becomes_visible(test: Callable[[], bool]) -> bool:
    """Return True as soon as ``test`` does, or False after ``VISIBLE_TIMEOUT_S``.

    An NFS client caches negative entries and directory listings, so files of another host may show late.
    """
    deadline, pause = time.monotonic() + VISIBLE_TIMEOUT_S, FIRST_POLL_S
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)
    return True


def refresh_listing(folder: Path) -> None:
    """List the folder: an NFS client then revalidates it, and drops its negative entries."""
    with suppress(OSError):
        os.listdir(folder)
