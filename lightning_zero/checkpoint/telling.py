"""A line now and then about what takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Telling"]

EVERY_S = 10.0


class Telling:
    """Is told of bytes, from any thread, and says how far that is.

    Args:
        what: is done, as in ``"Saving run/last.ckpt"``.
        done: to bytes, as in ``"written"``.
        tell: shows a line; None: to nobody.
    """

    def __init__(self, what: str, done: str, tell: Callable[[str], None] | None) -> None:
        self._what, self._done, self._tell = what, done, tell
        self._lock = threading.Lock()
        self._begun = self._told = time.monotonic()
        self._bytes = 0

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._bytes += count
            due = now - self._told >= EVERY_S
            if due:
                self._told = now
        if due and self._tell is not None:
            seconds = now - self._begun
            self._tell(f"{self._what}: this rank has {self._done} {self._bytes / 2**30:.1f} GiB in {seconds:.0f} s.")
