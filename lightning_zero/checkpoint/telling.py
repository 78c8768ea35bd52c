"""A bar, or a line now and then, about what takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Bar", "Show", "Telling"]

EVERY_S = 10.0


class Bar(Protocol):
    """On somebody's terminal."""

    def update(self, count: int) -> object:
        """So many bytes more are done."""

    def close(self) -> None:
        """It is taken away."""


Show = Callable[[str, int], Bar]  # of what is done, and to how many bytes


class Telling:
    """Is told of bytes, from any thread, and says how far that is, until its context ends.

    Args:
        what: is done, as in ``"Saving run/last.ckpt"``.
        done: to bytes, as in ``"written"``.
        tell: shows a line; None: to nobody.
        bar: shows it instead.
    """

    def __init__(self, what: str, done: str, tell: Callable[[str], None] | None, bar: Bar | None = None) -> None:
        self._what, self._done, self._tell, self._bar = what, done, tell, bar
        self._lock = threading.Lock()
        self._begun = self._told = time.monotonic()
        self._bytes = 0

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._bytes += count
            if self._bar is not None:
                self._bar.update(count)
                return
            due = now - self._told >= EVERY_S
            if due:
                self._told = now
        if due and self._tell is not None:
            seconds = now - self._begun
            self._tell(f"{self._what}: this rank has {self._done} {self._bytes / 2**30:.1f} GiB in {seconds:.0f} s.")

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
