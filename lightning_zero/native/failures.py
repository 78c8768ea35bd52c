"""Shows an exception that several ranks share once, with the list of these ranks.

Protocol, in the key-value store of the ranks: a rank that fails posts a digest of its exception, and waits a moment for
the posts of the others. Of the ranks with one digest, the first that claims it prints the traceback. When a process
ends by an exception that was shown, it only names it. Exit codes and exceptions stay as they are.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import Store

__all__ = ["Failures", "ShownErrorHook", "mark_shown"]

TO_POST_S = 1.0  # for which a rank waits for the posts of the others; a traceback should be seen soon
TO_HEAR_S = 4.5  # for which the rank that serves the store stays: the others end 3 s after they hear, and look each 0.5
TO_CLAIM_S = 0.5  # for which a rank leaves the traceback to a lower rank
POLL_S = 0.05
STORE_TIMEOUT = timedelta(seconds=5)
SHOWN = "_zero_shown"  # attribute of an exception: where its traceback is printed
# The numbers of ranks, devices and addresses in a message; the same exception has others on each rank.
OWN = re.compile(r"0x[0-9a-f]+|\b(rank|cuda|gpu|device|process)([ :=#_]*)\d+", re.IGNORECASE)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Failures:
    """The failures of one rank, as the other ranks learn of them.

    Args:
        store: Of these ranks. It is cloned: a thread that waits in a store's client keeps other threads out.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_TIMEOUT)
        self._rank, self._ranks = rank, range(world_size)
        self._stage = 0

    def begin(self) -> None:
        """Begin a stage, on all ranks: earlier failures are over."""
        self._stage += 1

    def show(self, error: BaseException) -> None:
        """Print the traceback, unless a rank with the same exception prints it. Not collective."""
        if getattr(error, SHOWN, ""):
            return
        try:
            first, ranks = self._share(_digest(error))
        except RuntimeError:  # the store is gone
            first, ranks = self._rank, [self._rank]
        if first == self._rank:
            print(f"[lightning_zero, rank {first}] {_failed(ranks)}:", file=sys.stderr)
            traceback.print_exception(error)
        elif self._rank not in ranks:
            print(f"[lightning_zero, rank {self._rank}] Failed, too, as rank {first} shows.", file=sys.stderr)
        sys.stderr.flush()
        mark_shown(error, "above" if first == self._rank else f"printed by rank {first}")

    def acknowledge(self) -> None:
        """Note that this rank knows of another one's failure."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(self._key("hears", self._rank), "")

    def wait_until_acknowledged(self) -> None:
        """Wait until the other ranks have failed, too, or know of this rank's failure; not for long.

        For the rank whose process serves the store, when it ends: the others would only find the store gone.
        """
        deadline, left = time.monotonic() + TO_HEAR_S, set(self._ranks) - {self._rank}
        with suppress(RuntimeError):
            while left and time.monotonic() < deadline:
                left = {rank for rank in left if not (self._has("hears", rank) or self._has("of", rank))}
                time.sleep(POLL_S if left else 0)

    def _share(self, digest: str) -> tuple[int, list[int]]:
        """Return the rank that prints the traceback, and those for which it does."""
        self._store.set(self._key("of", self._rank), digest)
        deadline, posts = time.monotonic() + TO_POST_S, [self._key("of", rank) for rank in self._ranks]
        while not self._store.check(posts) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        found = (rank for rank in self._ranks if self._has("of", rank))
        ranks = [rank for rank in found if self._store.get(self._key("of", rank)).decode() == digest]
        claim, deadline = self._key("first", digest), time.monotonic() + TO_CLAIM_S
        while self._rank != ranks[0] and not self._store.check([claim]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        first = int(self._store.compare_set(claim, "", str(self._rank)))
        if first == self._rank:
            self._store.set(self._key("ranks", digest), " ".join(map(str, ranks)))
        return first, [int(rank) for rank in self._store.get(self._key("ranks", digest)).split()]

    def _has(self, what: str, rank: int) -> bool:
        return self._store.check([self._key(what, rank)])

    def _key(self, what: str, of: object) -> str:
        return f"{self._stage}/{what}/{of}"


class ShownErrorHook:
    """In the place of ``sys.excepthook``: names an exception that was shown, and leaves others to the hook before.

    The hook before is called in any case, since a user's may do more than print: only its output is dropped.
    """

    def __init__(self, before: Hook) -> None:
        self._before = before

    @classmethod
    def install(cls) -> None:
        """Harmless when repeated."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        where = getattr(error, SHOWN, "")
        if not where:
            self._before(kind, error, trace)
            return
        with redirect_stderr(io.StringIO()):
            self._before(kind, error, trace)
        print(f"{kind.__name__}: {_first_line(error)} (traceback: {where})", file=sys.stderr)


def mark_shown(error: BaseException, where: str) -> None:
    """Have the end of this process by ``error`` only name it. ``where``: its traceback is printed."""
    try:
        setattr(error, SHOWN, where)
    except AttributeError:  # a class without attributes: it is shown again
        return
    ShownErrorHook.install()


def _digest(error: BaseException) -> str:
    """Return the same text on each rank for one exception: of one type, message and line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind, text = type(error), OWN.sub(r"\1", str(error))
    return hashlib.blake2s(f"{kind.__module__}.{kind.__qualname__}\0{text}\0{place}".encode()).hexdigest()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _failed(ranks: Sequence[int]) -> str:
    if len(ranks) < 2:
        return f"Rank {ranks[0]} failed"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} failed with one exception"
