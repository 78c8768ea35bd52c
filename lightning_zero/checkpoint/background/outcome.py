"""How a save that goes on beside training ends, the same on every rank: threads of the ranks tell each other through
the key-value store, in texts that run nothing: what reaches that store may write to it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_zero.checkpoint.sharded.commit import Brief
from lightning_zero.checkpoint.sharded.commit import Save, discard
from lightning_zero.checkpoint.unseen import Unseen
from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh

__all__ = ["Outcome"]

TO_PART_S = 10.0
POLL_S = 0.05  # a wait in the store would keep others from it
LOOK_S = 0.5  # between two looks at whether bytes move


class Outcome:
    """Of one save.

    Args:
        mesh: of the ranks. They wait for each other as long as bytes move on one of them, and its timeout longer.
        store: over a connection that no other thread uses.
        save: that has begun.
    """

    def __init__(self, mesh: Mesh, store: dist.Store, save: Save) -> None:
        self._mesh, self._store, self._save = mesh, store, save
        self._moves, self._moved_at, self._looked_at = -1, math.inf, -math.inf

    def wrote(self, count: int) -> None:
        """This rank's writer goes on, and has written so many bytes more. Not by two threads at once."""
        self._store.add(self._key(f"bytes {self._mesh.rank}"), count)
        self._store.add(self._key("moves"), 1)

    def of(self, write: Callable[[], Brief], finish: Callable[[Sequence[Brief]], None]) -> str | None:
        """Does this rank's part, and waits for the others'.

        Args:
            write: this rank's files; tells of them.
            finish: makes a checkpoint of what all ranks have written; only rank 0's is called.

        Returns:
            Why there is no checkpoint; None where there is one.
        """
        mine: Brief | str
        try:
            mine = write()
        except Exception as error:
            mine = _text(error)
        self._tell(self._mesh.rank, mine)
        if self._mesh.rank == 0:
            self._tell("end", self._end(finish))
        found = self._wait("end", TO_PART_S)  # rank 0 gives up first, and says for whom it waited
        self._part()
        return found if isinstance(found, str) else None

    def _part(self) -> None:
        """Rank 0 stays until the others know: with it ends the store."""
        self._tell(f"knows {self._mesh.rank}", None)
        if self._mesh.rank == 0:
            deadline = time.monotonic() + TO_PART_S
            others = [self._key(f"knows {rank}") for rank in range(1, self._mesh.world_size)]
            while others and not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _end(self, finish: Callable[[Sequence[Brief]], None]) -> str | None:
        ends = [self._wait(rank) for rank in range(self._mesh.world_size)]
        ranks = [end for end in ends if isinstance(end, Brief)]
        if len(ranks) < len(ends):
            failed = "; ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends) if not isinstance(end, Brief))
            discard(self._save.folder)
            return f"Could not {self._save.what}: {failed}"
        self.wrote(0)  # the others count from here
        try:
            with Unseen(lambda count: self.wrote(0)):  # it may copy all of it
                finish(ranks)
        except Exception as error:
            discard(self._save.folder)
            return f"Could not {self._save.what}: rank 0: {_text(error)}"
        for rank in range(self._mesh.world_size):
            self._store.delete_key(self._key(rank))
            self._store.delete_key(self._key(f"bytes {rank}"))
        return None

    def _tell(self, who: object, told: Brief | str | None) -> None:
        kind, text = ("brief", told.to_text()) if isinstance(told, Brief) else ("text", told)
        self._store.set(self._key(who), json.dumps([kind, text]))

    def _wait(self, who: object, longer_s: float = 0.0) -> Brief | str | None:
        while not self._store.check([self._key(who)]):
            if self._unmoved_s() > self._mesh.timeout_s + longer_s:
                return self._standing(who)
            time.sleep(POLL_S)
        try:
            kind, text = json.loads(self._store.get(self._key(who)))
            return Brief.from_text(text) if kind == "brief" else None if text is None else str(text)
        except (ValueError, TypeError, RecursionError, CheckpointError) as error:
            return f"what it has told cannot be read ({error})"

    def _unmoved_s(self) -> float:
        """For how long no rank has told of bytes, as far as this one has seen since it began to wait: several that are
        gone are not waited for one after the other."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at, before, self._moves = now, self._moves, self._store.add(self._key("moves"), 0)
            self._moved_at = now if self._moves != before else self._moved_at
        return now - self._moved_at

    def _standing(self, who: object) -> str:
        if not isinstance(who, int):  # for whom rank 0 waits, where it cannot say so itself, or what it does
            ranks = [rank for rank in range(self._mesh.world_size) if not self._store.check([self._key(rank)])]
            why = "; ".join(f"rank {rank}: {self._standing(rank)}" for rank in ranks)
            return f"Could not {self._save.what}: {why or 'rank 0 has all files, and makes no checkpoint of them'}"
        text = f"it has not ended, and no rank wrote anything more within the timeout of {self._mesh.timeout_s:.0f} s"
        return f"{text}; its writer was at {self._store.add(self._key(f'bytes {who}'), 0) / 2**30:.2f} GiB"

    def _key(self, who: object) -> str:
        return f"{self._save.save_id}/{who}"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
