"""Ranks find out whether they are about to run the same collectives, before the first of them.

A graph whose plan is new to this rank waits here until every rank has come with the same plan. A plan that all ranks
have had before needs no waiting, so ranks may compile again at different times, for batches of other lengths, as long
as what they gather stays the same.

Ranks meet in the key-value store of the process group, not in a collective: a rank that compiles alone finds nobody to
take part in one, and must say so instead of hanging. Protocol, per rank: ``busy`` holds ``"1"`` while it compiles;
``wants`` the digest that it waits with; ``plan/<digest>`` the plan's lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from lightning_zero.compile.graph_plan import first_difference
from lightning_zero.errors import RankMismatchError

__all__ = ["RankConsensus"]

POLL_S = 0.02


class RankConsensus:
    """What one rank knows of the others' plans.

    Args:
        store: key-value store that all ranks share (``set``, ``get``, ``check``); keys must be this engine's own.
        patience_s: how long, in seconds, a rank that neither compiles nor has come is waited for.
        limit_s: how long a rank that compiles is waited for.
        clock: seconds that only grow.
        check: called between two looks; raises when waiting longer makes no sense.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        patience_s: float,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.patience_s = patience_s
        self._limit_s = limit_s
        self._clock = clock
        self._check = check
        self._agreed: set[str] = set()
        self.needed: Callable[[], bool] = lambda: True  # whether graphs wait for other ranks at all

    def compiling(self, busy: bool) -> None:
        """Tells the others that this rank compiles, and may be late."""
        if self._world_size > 1:
            self._store.set(f"busy/{self._rank}", "1" if busy else "0")

    def check(self, digest: str, lines: Iterable[str]) -> None:
        """Returns once all ranks have come with ``digest``.

        Raises:
            RankMismatchError: a rank waits with another plan, or does not come.
        """
        if self._world_size == 1 or digest in self._agreed or not self.needed():
            return
        lines = list(lines)
        self._store.set(f"plan/{digest}/{self._rank}", "\n".join(lines))
        self._store.set(f"wants/{self._rank}", digest)
        begun = last_busy = self._clock()
        while True:
            missing = [rank for rank in range(self._world_size) if not self._has(f"plan/{digest}/{rank}")]
            if not missing:
                self._agreed.add(digest)
                return
            for rank in missing:
                wants = self._get(f"wants/{rank}")
                # The other may have had this plan, and have come to its next one, since we looked.
                if wants and wants not in self._agreed and not self._has(f"plan/{digest}/{rank}"):
                    self._raise_different(rank, wants, lines)
            now = self._clock()
            if any(self._get(f"busy/{rank}") == "1" for rank in missing):
                last_busy = now
            if now - last_busy > self.patience_s or now - begun > self._limit_s:
                self._raise_absent(missing, now - begun, lines)
            self._check()
            time.sleep(POLL_S)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._has(key) else ""

    def _raise_different(self, rank: int, wants: str, lines: list[str]) -> None:
        theirs = self._get(f"plan/{wants}/{rank}").split("\n")
        at, mine, other = first_difference(lines, theirs)
        raise RankMismatchError(
            f"Ranks {self._rank} and {rank} compiled graphs that gather different weights. The first difference is in "
            f"collective {at}: {mine!r} on rank {self._rank}, {other!r} on rank {rank}. Every rank must call the same "
            "modules and use the same parameters in each step; look for branches that depend on the data or on the "
            "rank."
        )

    def _raise_absent(self, missing: list[int], waited: float, lines: list[str]) -> None:
        ranks = ", ".join(map(str, missing))
        raise RankMismatchError(
            f"Rank {self._rank} is about to run a newly compiled graph that gathers other weights than before (first "
            f"{lines[0]!r}), but rank {ranks} did not come to the same point within {waited:.0f} s. Every rank must "
            "call the same modules and use the same parameters in each step; look for branches that depend on the data "
            "or on the rank. If a rank is only slow (data loading, writing a file), raise consensus_timeout_s."
        )
