"""Ranks look after each other from their first moment: before they have a process group, and while one of them builds
the C++ executor, whose watchdog takes over from there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_zero.native.host_process import kill_compilers, has_ended, own_process

__all__ = ["StartupWatch"]

TICK_S = 0.5
TO_FAIL_S = 3.0  # that a rank gets to fail by itself once another has
TO_COME_S = 1.0  # to the store, before anything else is done: who was never seen cannot be missed at once
TO_TELL_S = 2.0
STORE_GONE_S = 5.0
EARLIER_TICKS = 200  # of 10 ms; ranks that a launcher starts together start within this time
CONNECTION_S = 10.0


class _StartupStore:
    """What ranks tell each other, and read, in the key-value store by which the process group meets: by a client of its
    own, which neither needs the group nor counts as one of those that meet.

    Args:
        store: where ranks meet.
        rank: of this process.
        process: who this process is.
        of_launcher: whether the launcher serves the store, and starts ranks anew.
    """

    def __init__(self, store: Store, rank: int, process: dict[str, Any], of_launcher: bool) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives an attempt
        self._store = PrefixStore(f"lightning_zero/startup/{attempt}", store)
        self._rank, self._process, self._of_launcher = rank, process, of_launcher

    def post(self, what: str, text: str = "") -> None:
        self._store.set(f"{what}/{self._rank}", json.dumps(self._process | {"text": text}))
        if what == "failed":
            self._store.add("failures", 1)

    def any_failed(self) -> bool:
        return self._store.add("failures", 0) > 0

    def has(self, what: str, rank: int) -> bool:
        return self._store.check([f"{what}/{rank}"])

    def read(self, what: str, rank: int) -> dict[str, Any] | None:
        """What a rank has said. A launcher's store outlives its ranks when it starts them anew: only those count that
        it started about when it started this one, on the same host."""
        if not self.has(what, rank):
            return None
        told = json.loads(self._store.get(f"{what}/{rank}"))
        if not self._of_launcher:
            return told
        own = self._process
        together = told["host"] == own["host"] and int(told["started"]) > int(own["started"]) - EARLIER_TICKS
        return told if together else None


class StartupWatch:
    """A thread that tells the other ranks that this one is there, and ends the process when one of them is gone.

    Args:
        address, port: where the store is served, or will be.
        neighbours: the ranks of this host, whose processes can be seen.
        report_s: seconds after which a rank that waits for others to join says for which.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, neighbours: Iterable[int], report_s: float
    ) -> None:
        self._served_at = (address, port)
        self._neighbours = set(neighbours) - {rank}
        self._rank, self._world_size, self._report_s = rank, world_size, report_s
        self._over, self._here, self._told = threading.Event(), threading.Event(), threading.Event()
        self._failure: str | None = None
        self._joined = False
        self._of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._began = time.monotonic()
        self._seen: dict[int, dict[str, Any]] = {}
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-startup", daemon=True)
        self._thread.start()
        if rank != 0 or self._of_launcher:  # otherwise this rank is to serve it
            self._here.wait(TO_COME_S)

    def joined(self) -> None:
        """This rank is in the process group."""
        self._joined = True

    def fail(self, error: BaseException) -> None:
        """An exception ends this rank: the others hear of it."""
        lines = str(error).strip().splitlines()
        self._failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self.close()

    def close(self) -> None:
        """Something else looks after the ranks from now on."""
        self._over.set()
        self._told.wait(TO_TELL_S)

    def _run(self) -> None:
        try:
            store = self._connect()
            if store is None:
                return
            store.post("here")
            self._here.set()
            lost_since = None
            while not self._over.wait(TICK_S):
                try:
                    self._check_ranks(store)
                    lost_since = None
                except RuntimeError:  # what a store raises whose server is gone
                    now = time.monotonic()
                    lost_since = lost_since or now
                    if now - lost_since > STORE_GONE_S and not self._over.is_set():
                        self._end(
                            "The key-value store through which ranks find each other is gone: the process that serves "
                            "it, rank 0's or the launcher, has ended. Look for its error first."
                        )
            if self._failure is None:
                store.post("left")
            else:
                store.post("failed", self._failure)
        except RuntimeError:
            pass  # nobody is left to be told
        finally:
            self._here.set()
            self._told.set()

    def _connect(self) -> _StartupStore | None:
        while True:
            # Asked first whether anybody answers: the store's own client would complain until then.
            with suppress(OSError), socket.create_connection(self._served_at, timeout=CONNECTION_S):
                break
            if self._over.wait(TICK_S):
                return None
            self._report(None)
        patience = timedelta(seconds=CONNECTION_S)
        store = TCPStore(*self._served_at, is_master=False, timeout=patience, wait_for_workers=False)
        return _StartupStore(store, self._rank, own_process(), self._of_launcher)

    def _check_ranks(self, store: _StartupStore) -> None:
        if store.any_failed():
            for rank in range(self._world_size):
                failed = store.read("failed", rank)
                if failed is None or rank == self._rank:
                    continue
                if not self._over.wait(TO_FAIL_S):
                    self._end(f"Rank {rank} failed: {failed['text']}")
                return
        for rank in self._neighbours - self._gone:
            process = self._seen.get(rank) or store.read("here", rank)
            if process is None:
                continue
            self._seen[rank] = process
            if not has_ended(process):
                continue
            self._gone.add(rank)
            # One that has left is not missed, and one that failed has said so, both perhaps a moment ago.
            if store.read("left", rank) is None and store.read("failed", rank) is None:
                self._end(
                    f"The process of rank {rank} (number {process['pid']}) is gone without a word, while ranks were "
                    "setting up. It was killed (SIGKILL, out of host memory), it crashed, or it called exit()."
                )
        self._report(store)

    def _report(self, store: _StartupStore | None) -> None:
        waited = time.monotonic() - self._began
        if self._joined or waited < self._report_s:
            return
        self._report_s *= 10
        who = "The store there does not answer: rank 0, or the launcher, which serves it, has not come."
        if store is not None:
            missing = [rank for rank in range(self._world_size) if not self._has_come(store, rank)]
            if not missing:
                return
            who = f"Not there yet: {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}."
        self._say(
            f"No progress. This is rank {self._rank}, which has waited for {waited:.0f} s for {self._world_size} ranks "
            f"to join the process group at {':'.join(map(str, self._served_at))}. {who}"
        )

    def _has_come(self, store: _StartupStore, rank: int) -> bool:
        return store.has("here", rank) if rank not in self._neighbours else store.read("here", rank) is not None

    def _say(self, text: str) -> None:
        os.write(2, f"[lightning_zero, rank {self._rank}] {text}\n".encode())  # one call, so that lines do not mix

    def _end(self, text: str) -> None:
        self._say(f"{text}\nThis is rank {self._rank}, setting up. It cannot continue alone and ends too.")
        kill_compilers()
        os._exit(1)
