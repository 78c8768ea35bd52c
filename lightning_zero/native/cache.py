"""Cache of built libraries and its lock. Only this user and root may write to it.

The path of the cache may contain links. It is resolved once, and each directory of the resolved path is checked, as
OpenSSH does for keys. In the cache, links are rejected. A prebuilt cache (in an image, on a shared file system) may be
read-only and belong to root.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import logging
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_zero.errors import NativeBuildError

log = logging.getLogger(__name__)

INSTEAD = "Set LIGHTNING_ZERO_CACHE to a writable directory of your own."
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
UNMAPPED = Path("/proc/sys/kernel/overflowuid")  # owner of files of users outside this user namespace


def default_cache() -> Path:
    """Return ``$LIGHTNING_ZERO_CACHE``, or ``lightning_zero`` in the user's cache directory.

    Use a temporary directory if the user has no home, as in a container whose user has no name.
    """
    explicit = os.environ.get("LIGHTNING_ZERO_CACHE")
    if explicit:
        return _expanded(explicit)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    except RuntimeError:
        return _without_home()
    return caches / "lightning_zero"


def resolve_cache(cache: Path) -> Path:
    """Return the absolute path without links and ``~``."""
    try:
        return _expanded(str(cache)).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise NativeBuildError(f"The build cache {cache} cannot be found ({error}). {INSTEAD}") from error


def _expanded(cache: str) -> Path:
    try:
        return Path(cache).expanduser()
    except RuntimeError as error:
        raise NativeBuildError(
            f"The build cache {cache!r} begins with a home directory that is not known ({error}). Set "
            "LIGHTNING_ZERO_CACHE to an absolute path."
        ) from error


def _without_home() -> Path:
    try:
        # Includes the user: check_owner would reject another user's folder.
        folder = Path(tempfile.gettempdir()) / f"lightning_zero-{os.geteuid()}"
    except OSError as error:
        raise NativeBuildError(
            f"There is no directory for lightning_zero's C++ executor: this user has no home directory, and {error}. "
            + INSTEAD
        ) from error
    log.debug("C++ executor: this user has no home directory (folder=%s). %s", folder, INSTEAD)
    return folder


def make_private_folder(folder: Path) -> None:
    """Make a cache entry that only this user can write.

    Others can read it if they can read the cache. Idempotent.

    Args:
        folder: The entry; its parent is the cache, whose path is :func:`resolve_cache`.

    Raises:
        NativeBuildError: It cannot be made, or others can write it.
    """
    cache = folder.parent
    try:
        for parent in reversed(cache.parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)  # for any umask: others must not replace the contents
        cache.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        check_parents(cache)
        check_owner(cache)
        folder.mkdir(mode=stat.S_IMODE(cache.stat().st_mode) & ~OTHERS_WRITE | stat.S_IRWXU, exist_ok=True)
    except OSError as error:
        raise unwritable_error(folder, error) from error
    check_owner(folder)


def check_owner(path: Path) -> None:
    """Raise if another user could have written this part of the cache: it would run as this user.

    Raises:
        NativeBuildError: The path is a link, belongs to neither root nor this user, or others can write it.
    """
    status = _status(path)
    if stat.S_ISLNK(status.st_mode):
        raise NativeBuildError(
            f"{path} of the build cache is a symbolic link, by which code from outside the cache would be loaded. "
            "Delete it, and the library is built again. To keep the cache elsewhere, set LIGHTNING_ZERO_CACHE."
        )
    if status.st_uid not in (0, os.geteuid()):
        raise NativeBuildError(
            f"{path} of the build cache belongs to another user (number {status.st_uid}; this process runs as "
            f"{os.geteuid()}), whose code would be loaded. {INSTEAD}"
        )
    if status.st_mode & OTHERS_WRITE:
        raise NativeBuildError(
            f"{path} of the build cache can be written by others ({stat.filemode(status.st_mode)}), whose code could "
            f"be loaded. Delete it, or run `chmod -R go-w {path}` if you trust it; or set LIGHTNING_ZERO_CACHE "
            "to a directory of your own."
        )


def check_parents(cache: Path) -> None:
    """Raise if another user could replace the cache by another directory.

    Args:
        cache: Its path is :func:`resolve_cache`.

    Raises:
        NativeBuildError: A parent belongs to another user, or others can write it. A sticky directory (such as /tmp)
            and a group that holds only this user are accepted.
    """
    for parent in cache.parents:
        status = _status(parent)
        if status.st_uid not in (0, os.geteuid(), _unmapped_user()):
            raise NativeBuildError(
                f"The build cache is in {parent}, which belongs to another user (number {status.st_uid}; this process "
                f"runs as {os.geteuid()}), who could put other code there. {INSTEAD}"
            )
        open_to_all = status.st_mode & stat.S_IWOTH
        open_to_group = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
        if (open_to_all or open_to_group) and not status.st_mode & stat.S_ISVTX:
            raise NativeBuildError(
                f"The build cache is in {parent}, which others can write ({stat.filemode(status.st_mode)}), who could "
                f"put other code there. Run `chmod go-w {parent}`; or set LIGHTNING_ZERO_CACHE to a directory that "
                "others can write neither itself nor above it."
            )


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat(follow_symlinks=False)
    except PermissionError as error:
        raise NativeBuildError(f"This user may not read the build cache {path} ({error}). {INSTEAD}") from error


def _is_private(group: int) -> bool:
    """Return True for a group of this user alone, as distributions make one for each user."""
    try:
        user, status = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and status.gr_name == user.pw_name and set(status.gr_mem) <= {user.pw_name}


def _unmapped_user() -> int:
    try:
        return int(UNMAPPED.read_text())
    except (OSError, ValueError):
        return 0


@contextmanager
def lock_entry(
    folder: Path,
    deadline_s: float,
    report: Callable[..., Any] = log.warning,
) -> Iterator[None]:
    """Hold the entry's OS lock, which a killed process releases.

    Without lock support, several processes may build.

    Args:
        folder: The entry.
        deadline_s: How long to wait for another process, in seconds.
        report: Called if this waits.

    Raises:
        NativeBuildError: The lock cannot be written, or the deadline passed.
    """
    try:
        # Closed below, which releases it. Not through a link: opening truncates the file.
        lock = open(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "w")  # noqa: SIM115
    except OSError as error:
        raise unwritable_error(folder, error) from error
    with lock:
        _acquire(lock, folder / "lock", deadline_s, report)
        try:
            yield
        finally:
            # Closing is not enough: a forked process has the file open, too.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def unwritable_error(folder: Path, error: OSError) -> NativeBuildError:
    return NativeBuildError(f"Cannot write the build cache {folder} ({error}). {INSTEAD}")


def _acquire(lock: TextIO, path: Path, deadline_s: float, report: Callable[..., Any]) -> None:
    start = time.monotonic()
    reported = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                # Do not wait: some network file systems have no locks.
                report(
                    "C++ executor: no lock, so several processes may build at once (path=%s, reason=%s)", path, error
                )
                return
        waited = time.monotonic() - start
        if waited > deadline_s:
            raise NativeBuildError(
                f"Another process has been building lightning_zero's C++ executor for {waited:.0f} s (it holds "
                f"{path}). End that process, or set LIGHTNING_ZERO_CACHE to another directory."
            )
        if not reported and waited > 2:
            report("C++ executor: waiting for another process that builds it (lock=%s)", path)
            reported = True
        time.sleep(0.1)
