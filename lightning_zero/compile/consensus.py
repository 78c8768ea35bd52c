"""Check that all ranks run the same collectives, before the first of them.

A graph with a new plan waits until every rank has arrived with the same plan. Agreed plans need no waiting, so ranks
may recompile at different times for other batch lengths if they gather the same weights.

Ranks use the process group's key-value store. A collective would hang if a single rank compiles. Keys per rank:
``busy`` is ``"1"`` while it compiles; ``wants`` is the digest that it waits with; ``plan/<digest>`` has the plan's
lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from lightning_zero.compile.graph_plan import first_difference
from lightning_zero.errors import RankMismatchError

POLL_S = 0.02
LONGEST_POLL_S = 1.0  # counted of a poll: if this process was stopped meanwhile, the others may have been, too


class RankConsensus:
    """Consensus of one rank with the others about plans.

    Args:
        store: key-value store shared by all ranks (``set``, ``get``, ``check``); keys must belong to this engine.
        patience_s: seconds to wait for a rank that neither compiles nor arrives.
        limit_s: seconds to wait for a rank that compiles.
        needed: returns True if graphs must wait for other ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        patience_s: float,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.patience_s = patience_s
        self._limit_s = limit_s
        self._check = check
        self._agreed: set[str] = set()
        self._needed = needed

    def compiling(self, busy: bool) -> None:
        """Inform the other ranks that this one compiles and may be late."""
        if self._world_size > 1:
            self._store.set(f"busy/{self._rank}", "1" if busy else "0")

    def check(self, digest: str, lines: Iterable[str]) -> None:
        """Return when all ranks have arrived with ``digest``.

        Raises:
            RankMismatchError: a rank waits with another plan, or does not arrive.
        """
        if self._world_size == 1 or digest in self._agreed or not self._needed():
            return
        lines = list(lines)
        self._store.set(f"plan/{digest}/{self._rank}", "\n".join(lines))
        self._store.set(f"wants/{self._rank}", digest)
        waited = idle = 0.0
        polled_at = time.monotonic()
        while True:
            missing = [rank for rank in range(self._world_size) if not self._has(f"plan/{digest}/{rank}")]
            if not missing:
                self._agreed.add(digest)
                return
            for rank in missing:
                wants = self._get(f"wants/{rank}")
                # The other rank may have had this plan and arrived at its next one since the lookup.
                if wants and wants not in self._agreed and not self._has(f"plan/{digest}/{rank}"):
                    self._raise_different(rank, wants, lines)
            passed, polled_at = min(time.monotonic() - polled_at, LONGEST_POLL_S), time.monotonic()
            waited += passed
            idle = 0.0 if any(self._get(f"busy/{rank}") == "1" for rank in missing) else idle + passed
            if idle > self.patience_s or waited > self._limit_s:
                self._raise_absent(missing, waited, lines)
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
            f"{lines[0]!r}), but rank {ranks} did not reach the same point within {waited:.0f} s. Every rank must "
            "call the same modules and use the same parameters in each step; look for branches that depend on the data "
            "or on the rank. If a rank is only slow (data loading, writing a file), raise consensus_timeout_s."
        )
