"""Hold the place where a save writes against other saves to it, also of other processes and hosts.

A claim is a lock of the system's, which ends with the process. A file system without locks grants every claim; a save
then notices at its end that another one has taken its place.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_zero.errors import CheckpointError

__all__ = ["PATIENCE_S", "concurrent_save_error", "claim", "release", "unclaimed"]

PATIENCE_S = 5.0  # to claim what this save has just made; the other's look takes microseconds on an idle host
POLL_S = 0.005


def claim(number: int, patience_s: float = 0.0) -> bool:
    """Lock an open file or folder until it is released or closed. Return False if another save has locked it.

    Args:
        number: of its descriptor.
        patience_s: how long to try again; another save that looks whether this is claimed locks it for a moment.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        except OSError:  # no locks here
            return True


def release(number: int) -> None:
    """Unlock it, also if a process that was forked meanwhile has it open."""
    with suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_UN)


@contextmanager
def unclaimed(work: Path, path: object) -> Iterator[None]:
    """Surround the removal of what a save to ``path`` has left at ``work``: no other save claims it meanwhile.

    Raises:
        CheckpointError: a save goes on, which writes there.
    """
    number = None
    with suppress(OSError):  # nothing is there
        number = os.open(work, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if number is not None and not claim(number):
            raise concurrent_save_error(path)
        yield
    finally:
        if number is not None:
            os.close(number)


def concurrent_save_error(path: object) -> CheckpointError:
    """Return the error of a save that finds another one to ``path`` going on."""
    return CheckpointError(
        f"another save to {path} goes on at the same time, and this one has written nothing. Wait until the other has "
        "ended, or let each training save to a place of its own."
    )
