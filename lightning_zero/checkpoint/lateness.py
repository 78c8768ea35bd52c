"""On a shared file system what another host has just made may show late: an NFS client remembers for a while what was
not there, and the folder's old contents."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["refresh_listing", "shows"]

LATE_S = 10.0
FIRST_S, LONGEST_S = 0.01, 0.5  # between two looks


def shows(look: Callable[[], bool]) -> bool:
    """Whether ``look`` gives True at once or soon. Where it does not, this takes ``LATE_S`` seconds, once per save or
    load that fails for it."""
    deadline, pause = time.monotonic() + LATE_S, FIRST_S
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_S)
    return True


def refresh_listing(folder: Path) -> None:
    """Lists it, for which an NFS client asks the server whether it has changed, and forgets what was not there."""
    with suppress(OSError):
        os.listdir(folder)
