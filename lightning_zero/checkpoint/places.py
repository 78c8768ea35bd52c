"""Files and folders that are written beside the place where they belong, and put there at once: whoever dies meanwhile
leaves what stood there."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "INCOMPLETE",
    "REMOVED",
    "REPLACED",
    "beside",
    "restore_replaced",
    "exchange",
    "make_folders",
    "replace_atomically",
    "remove",
    "remove_leftover",
    "standing",
    "sync_folder",
]

INCOMPLETE = ".incomplete"  # what is written
COPIED_AT_ONCE = 16 << 20  # bytes of a copy that are in memory at a time
CHANGED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)  # by another save meanwhile
TRIES = 10  # to remove a folder in which another save writes
LONGEST, SOME = 255, 40  # bytes of a name, and characters of one, each up to four bytes
REMOVED = ".removed"  # what a save has left that was killed, while the next one removes it
REPLACED = ".replaced"  # what stood there before, where one rename cannot put something else in its place


def beside(path: Path, ending: str) -> Path:
    """The name next to it; a short one where file systems, which take that one, would not take this."""
    name = path.name + ending
    if len(os.fsencode(name)) > LONGEST >= len(os.fsencode(path.name)):
        name = f"{path.name[:SOME]}-{hashlib.blake2s(os.fsencode(path.name)).hexdigest()[:32]}{ending}"
    return path.with_name(name)


def replace_atomically(work: Path, path: Path) -> None:
    """Puts the finished file or folder ``work`` at ``path``, and removes what stood there afterwards, whatever it was.
    Its contents must be on the disk already; its name is when this returns. Where this fails, all is as before."""
    if not os.path.lexists(path):
        _move(work, path)
        _sync_or(lambda: _move(path, work), path.parent)
    elif exchange(work, path):
        _sync_or(lambda: exchange(work, path), path.parent)
        _remove_at_last(work)
    elif not any(_is_folder(one) for one in (work, path)) and _replace(work, path):
        sync_folder(path.parent)
    else:
        old = beside(path, REPLACED)
        remove(old)
        _move(path, old)
        try:
            _move(work, path)
        except OSError:
            _move(old, path)
            raise
        sync_folder(path.parent)
        _remove_at_last(old)


def restore_replaced(path: Path) -> None:
    """Where somebody died in :func:`replace_atomically`: between its two renames, what stood at ``path`` stands there again;
    after them, what was replaced is removed."""
    old = beside(path, REPLACED)
    if standing(path) == old:
        _move(old, path)
    else:
        remove(old)


def standing(path: Path) -> Path:
    """Where what belongs at ``path`` is read: there, or, where somebody died between two renames, beside."""
    old = beside(path, REPLACED)
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def _sync_or(undo: Callable[[], object], parent: Path) -> None:
    try:
        sync_folder(parent)
    except OSError:
        undo()
        raise


def _remove_at_last(path: Path) -> None:
    """What took its place is complete, so nothing has failed where this may not be removed. The next save to the same
    place tries again, and says so."""
    with suppress(OSError):
        remove(path)


def _replace(one: Path, other: Path) -> bool:
    """Rename ``one`` to ``other``, a file that exists; return False if the file system answers EXDEV."""
    try:
        os.replace(one, other)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _move(one: Path, other: Path) -> None:
    """Rename a file or a folder to ``other``, where nothing exists; copy it if the file system answers EXDEV.

    Union and overlay file systems answer EXDEV inside one folder, too: for a folder of a lower layer, for example.
    ``one`` is removed after its copy is on the disk. If copying fails, ``one`` is unchanged and ``other`` is removed.
    """
    try:
        os.rename(one, other)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    try:
        _copy(one, other)
    except BaseException:
        with suppress(OSError):  # the first error has the cause
            remove(other)
        raise
    remove(one)


def _copy(one: Path, other: Path) -> None:
    """Copy a file, a link or a folder, and wait until the copy is on the disk."""
    if _is_folder(one):
        other.mkdir()
        for entry in os.scandir(one):
            _copy(Path(entry.path), other / entry.name)
        sync_folder(other)
    elif one.is_symlink():
        other.symlink_to(os.readlink(one))
    else:
        with open(one, "rb") as given, open(other, "xb") as copy:
            shutil.copyfileobj(given, copy, COPIED_AT_ONCE)
            copy.flush()
            os.fsync(copy.fileno())


def exchange(one: Path, other: Path) -> bool:
    """Lets two names of a file system change places at once; False where the system cannot."""
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
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftover(path: Path, ending: str) -> None:
    """Remove what stands next to ``path`` under its name with ``ending``. A folder is renamed first, at once: a save
    that goes on in it finds that it is no longer there, and not that some of its files are missing."""
    work, aside = beside(path, ending), beside(path, REMOVED)
    for left in range(TRIES, 0, -1):  # another save may do the same, or write into what is removed
        try:
            remove(aside)
            if _is_folder(work):
                os.rename(work, aside)
                remove(aside)
            else:
                remove(work)
            return
        except OSError as error:
            if error.errno not in CHANGED or left == 1:
                raise


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
