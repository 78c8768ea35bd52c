"""Files and folders that are written beside the place where they belong, and put there at once: whoever dies meanwhile
leaves what stood there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

__all__ = ["INCOMPLETE", "REPLACED", "beside", "exchange", "make_folders", "put_in_place", "remove", "sync_folder"]

INCOMPLETE = ".incomplete"  # what is written
REPLACED = ".replaced"  # what stood there before, where one rename cannot put something else in its place


def beside(path: Path, ending: str) -> Path:
    """The name next to it."""
    return path.with_name(path.name + ending)


def put_in_place(work: Path, path: Path) -> None:
    """Puts the finished file or folder ``work`` at ``path``, and removes what stood there afterwards, whatever it was.
    Its contents must be on the disk already; its name is when this returns."""
    parent = path.parent
    if not os.path.lexists(path):
        os.rename(work, path)
        sync_folder(parent)
    elif exchange(work, path):
        sync_folder(parent)
        remove(work)
    else:
        old = beside(path, REPLACED)
        remove(old)
        os.rename(path, old)
        os.rename(work, path)
        sync_folder(parent)
        remove(old)


def exchange(one: Path, other: Path) -> bool:
    """Lets two names of a file system change places at once; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    if rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk; the files themselves are their writers' business."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_folders(path: Path) -> None:
    """Makes the folder and those above it, as far as they are missing, and brings their names to the disk."""
    missing = [path, *path.parents]
    missing = missing[: next(number for number, folder in enumerate(missing) if folder.is_dir())]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
