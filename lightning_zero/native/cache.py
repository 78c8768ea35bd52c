"""Where built libraries lie: folders that nobody else can write, since what lies there is loaded and run; and the lock
of one of them.

A cache that was filled ahead of time (in an image, on a shared file system) may be read-only, and belong to root.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_zero.errors import NativeBuildError

__all__ = ["check_owner", "default_cache", "locked", "make_private"]

log = logging.getLogger(__name__)

INSTEAD = "Set LIGHTNING_ZERO_CACHE to a writable directory of your own."
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_cache() -> Path:
    """``$LIGHTNING_ZERO_CACHE``, or ``lightning_zero`` among the user's caches; without a home, as in a container whose
    user has no name, among temporary files."""
    explicit = os.environ.get("LIGHTNING_ZERO_CACHE")
    if explicit:
        return Path(explicit)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return _without_home()
    return caches / "lightning_zero"


def _without_home() -> Path:
    try:
        # Named by the user: another's folder of this name would be refused.
        folder = Path(tempfile.gettempdir()) / f"lightning_zero-{os.geteuid()}"
    except OSError as error:
        raise NativeBuildError(
            f"There is no directory for lightning_zero's C++ executor: this user has no home directory, and {error}. "
            + INSTEAD
        ) from error
    log.info("This user has no home directory: the C++ executor is kept in %s. %s", folder, INSTEAD)
    return folder


def make_private(folder: Path) -> None:
    """Makes a directory for this user alone; inside a cache that more users may read, one that they may read, too.
    Harmless when it is there.

    Raises:
        NativeBuildError: it cannot be made, or is somebody else's to write.
    """
    cache = folder.parent
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        check_owner(cache)
        folder.mkdir(mode=stat.S_IMODE(cache.stat().st_mode) & ~OTHERS_WRITE | stat.S_IRWXU, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    check_owner(folder)


def check_owner(path: Path) -> None:
    """Refuses what somebody else could have written: it would run as this user.

    Raises:
        NativeBuildError: the file or directory belongs to neither root nor this user, or others may write it.
        FileNotFoundError: it is not there.
    """
    try:
        found = path.stat()
    except PermissionError as error:
        raise NativeBuildError(f"This user may not read the build cache {path} ({error}). {INSTEAD}") from error
    if found.st_uid not in (0, os.geteuid()):
        raise NativeBuildError(
            f"{path} of the build cache belongs to another user (number {found.st_uid}; this process runs as "
            f"{os.geteuid()}), whose code would be loaded. {INSTEAD}"
        )
    if found.st_mode & OTHERS_WRITE:
        raise NativeBuildError(
            f"{path} of the build cache can be written by others ({stat.filemode(found.st_mode)}), whose code could be "
            f"loaded. Delete it, or run `chmod -R go-w {path}` if you trust what it holds; or set LIGHTNING_ZERO_CACHE "
            "to a directory of your own."
        )


@contextmanager
def locked(
    folder: Path,
    deadline_s: float,
    say: Callable[..., Any] = log.warning,
    check: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Inside, no other process is: an OS lock, which a killed process releases. Where the file system has no locks,
    several may be.

    Args:
        deadline_s: how long to wait for another process, in seconds.
        say: shows the user that this waits.
        check: is called while this waits; what it raises ends that.

    Raises:
        NativeBuildError: the lock cannot be written, or the deadline passed.
    """
    try:
        lock = open(folder / "lock", "w")  # noqa: SIM115 - closed below, which releases it
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:
        _acquire(lock, deadline_s, say, check)
        try:
            yield
        finally:
            # Closing would not do: a process that was forked meanwhile has the file open, too.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _unwritable(folder: Path, error: OSError) -> NativeBuildError:
    return NativeBuildError(f"Cannot write the build cache {folder} ({error}). {INSTEAD}")


def _acquire(lock: TextIO, deadline_s: float, say: Callable[..., Any], check: Callable[[], None]) -> None:
    start = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                # Waiting would not help: some network file systems have no locks.
                say("%s cannot be locked (%s): several processes may build at once.", lock.name, error)
                return
        waited = time.monotonic() - start
        if waited > deadline_s:
            raise NativeBuildError(
                f"Another process has been building lightning_zero's C++ executor for {waited:.0f} s (it holds "
                f"{lock.name}). End that process, or set LIGHTNING_ZERO_CACHE to another directory."
            )
        if not told and waited > 2:
            say("Waiting while another process builds the C++ executor (%s).", lock.name)
            told = True
        check()
        time.sleep(0.1)
