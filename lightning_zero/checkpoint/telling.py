"""A bar, or a line now and then, about what takes long; other ranks, which may wait for it, hear that it goes on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from lightning_zero.checkpoint.unseen import Unseen

__all__ = ["Bar", "Show", "Telling", "TellingFor", "untold"]

EVERY_S, MOVED_EVERY_S = 10.0, 0.5


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
        total: bytes that there are.
        moved: hears how far it is whenever it is farther, though not more often than ranks look; "" when it is over.
    """

    def __init__(
        self,
        what: str,
        done: str,
        tell: Callable[[str], None] | None,
        bar: Bar | None = None,
        total: int = 0,
        moved: Callable[[str], None] | None = None,
    ) -> None:
        self._what, self._done, self._tell, self._bar, self._total, self._moved = what, done, tell, bar, total, moved
        self._lock = threading.Lock()
        self._begun = self._told = time.monotonic()
        self._moved_at = -math.inf
        self._bytes = 0

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._bytes += count
            if self._moved is not None and now - self._moved_at >= MOVED_EVERY_S:
                self._moved_at = now
                self._moved(self._how_far())
            if self._bar is not None:
                self._bar.update(count)
                return
            due = now - self._told >= EVERY_S
            if due:
                self._told = now
        if due and self._tell is not None:
            seconds = now - self._begun
            self._tell(f"{self._what}: this rank has {self._done} {self._bytes / 2**30:.1f} GiB in {seconds:.0f} s.")

    def _how_far(self) -> str:
        done, total = (f"{count / 2**30:.2f}" for count in (self._bytes, self._total))
        return f"{self._what[:1].lower()}{self._what[1:]} ({done} of {total} GiB {self._done})"

    def __enter__(self) -> Telling:
        if self._moved is not None:
            self._moved(self._how_far())
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._moved is not None:
            with self._lock:  # a thread may be late
                self._moved("")
                self._moved = None


class TellingFor:
    """Tells others that code goes on that tells nothing, as far as that is seen from outside, until its context ends.

    Args:
        what: it does, as in ``"saving run/last.ckpt by UsersIO"``.
        moved: as of :class:`Telling`.
    """

    def __init__(self, what: str, moved: Callable[[str], None]) -> None:
        self._what, self._moved = what, moved
        self._inside = ""
        self._bytes = 0
        self._unseen = Unseen(self._handed_on)

    def inside(self, how_far: str) -> None:
        """``moved`` for what it calls that does tell, whose words say more."""
        self._inside = how_far
        self._moved(how_far or self._how_far())

    def _handed_on(self, count: int) -> None:
        self._bytes = count
        self._moved(self._inside or self._how_far())

    def _how_far(self) -> str:
        return f"{self._what} (this process has handed on {self._bytes / 2**30:.2f} GiB meanwhile)"

    def __enter__(self) -> TellingFor:
        self._moved(self._how_far())
        self._unseen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._unseen.__exit__()
        self._moved("")


def untold(total: int) -> Telling:
    """Of what nobody wants to hear."""
    return Telling("", "", None)
