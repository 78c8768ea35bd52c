"""Fault detection while ranks start up, before the executor's watchdog exists.

Ranks may be joining the process group, or waiting for one that builds the C++ executor.

The executor's watchdog takes over afterwards.
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
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_zero.mesh import boot_id, host_name
from lightning_zero.native.build import kill_compilers

TICK_S = 0.5
TO_FAIL_S = 3.0  # for a rank to fail by itself after another one has
TO_COME_S = 5.0  # to reach the store first: a rank that was never seen cannot be missed
TO_TELL_S = 10.0  # for another process's store to be reached; on busy machines it took more than two
TO_TELL_OWN_S = 2.0  # for a store that this rank would have served itself, perhaps never
STORE_GONE_S = 5.0
EARLIER_TICKS = 200  # of 10 ms; a launcher starts its ranks within this time, unless the machine is very busy
CONNECTION_S = 10.0


class _StartupStore:
    """Messages of ranks in the key-value store with which the process group is initialized.

    It uses a client of its own, which needs no process group and does not count as a joining rank.

    Args:
        of_launcher: True if the launcher serves the store and restarts ranks.
    """

    def __init__(self, store: Store, rank: int, process: dict[str, Any], of_launcher: bool) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives an attempt
        self._store = PrefixStore(f"lightning_zero/startup/{attempt}", store)
        self._rank, self._process, self._of_launcher = rank, process, of_launcher
        self._alive: set[tuple[int, str]] = set()  # processes that were alive when their message was read

    def post(self, kind: str, text: str = "") -> None:
        self._store.set(f"{kind}/{self._rank}", json.dumps(self._process | {"text": text}))
        if kind == "failed":
            self._store.add("failures", 1)

    def any_failed(self) -> bool:
        return self._store.add("failures", 0) > 0

    def has(self, kind: str, rank: int) -> bool:
        return self._store.check([f"{kind}/{rank}"])

    def read(self, kind: str, rank: int) -> dict[str, Any] | None:
        """Return a rank's message; None if there is none.

        A launcher's store outlives its ranks. So only messages of ranks on the same host count that it started together
        with this one, or that are alive: a launcher ends its ranks before it starts others.
        """
        if not self.has(kind, rank):
            return None
        message = json.loads(self._store.get(f"{kind}/{rank}"))
        if not self._of_launcher:
            return message
        if message["host"] != self._process["host"]:
            return None
        process = (message["pid"], message["started"])
        if not has_ended(message):
            self._alive.add(process)
        together = int(message["started"]) > int(self._process["started"]) - EARLIER_TICKS
        return message if together or process in self._alive else None


class StartupWatch:
    """A thread that announces this rank to the others, and ends the process when one of them is gone.

    Args:
        address, port: Where the store is served, now or later.
        report_s: Seconds after which a waiting rank reports the missing ones.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, neighbours: Iterable[int], report_s: float
    ) -> None:
        self._served_at = (address, port)
        self._neighbours = set(neighbours) - {rank}
        self._rank, self._world_size, self._report_s = rank, world_size, report_s
        self._stopped, self._announced, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._failure: str | None = None
        self._joined = False
        self._of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = rank == 0 and not self._of_launcher
        self._to_tell_s = TO_TELL_OWN_S if serves else TO_TELL_S
        self._began = self._stopped_at = time.monotonic()
        self._seen: dict[int, dict[str, Any]] = {}
        self._ended: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-startup", daemon=True)
        self._thread.start()
        if not serves:  # later
            self._announced.wait(TO_COME_S)

    def joined(self) -> None:
        """Note that this rank is in the process group."""
        self._joined = True

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that an exception ends this one."""
        lines = str(error).strip().splitlines()
        self._failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self.close()

    def close(self) -> None:
        """Stop: the watchdog takes over."""
        self._stopped_at = time.monotonic()
        self._stopped.set()
        self._reported.wait(self._to_tell_s)

    def _run(self) -> None:
        try:
            store = self._connect()
            if store is None:
                return
            store.post("here")
            self._announced.set()
            lost_since = None
            while not self._stopped.wait(TICK_S):
                try:
                    self._check_ranks(store)
                    lost_since = None
                except RuntimeError:  # raised by a store whose server is gone
                    now = time.monotonic()
                    lost_since = lost_since or now
                    if now - lost_since > STORE_GONE_S and not self._stopped.is_set():
                        self._end(
                            "The key-value store through which ranks find each other is closed: the process that "
                            "serves it, rank 0's or the launcher, has ended. Look for its error first."
                        )
            if self._failure is None:
                store.post("left")
            else:
                store.post("failed", self._failure)
        except RuntimeError:
            pass  # no rank is left
        finally:
            self._announced.set()
            self._reported.set()

    def _connect(self) -> _StartupStore | None:
        while True:
            # Test the port first: the store's own client would print warnings until it is served.
            with suppress(OSError), socket.create_connection(self._served_at, timeout=CONNECTION_S):
                break
            if not self._stopped.wait(TICK_S):
                self._report(None)
            elif self._failure is None or time.monotonic() > self._stopped_at + self._to_tell_s:
                return None
            else:  # the store may be served in time for the failure to be reported
                time.sleep(TICK_S)
        patience = timedelta(seconds=CONNECTION_S)
        store = TCPStore(*self._served_at, is_master=False, timeout=patience, wait_for_workers=False)
        return _StartupStore(store, self._rank, own_process(), self._of_launcher)

    def _check_ranks(self, store: _StartupStore) -> None:
        if store.any_failed():
            for rank in range(self._world_size):
                failed = store.read("failed", rank)
                if failed is None or rank == self._rank:
                    continue
                if not self._stopped.wait(TO_FAIL_S):
                    self._end(f"Rank {rank} failed: {failed['text']}")
                return
        for rank in self._neighbours - self._ended:
            process = self._seen.get(rank) or store.read("here", rank)
            if process is None:
                continue
            self._seen[rank] = process
            if not has_ended(process):
                continue
            self._ended.add(rank)
            # A rank that has left is not missing, and one that failed has reported it, both perhaps just now.
            if store.read("left", rank) is None and store.read("failed", rank) is None:
                self._end(
                    f"The process of rank {rank} (pid {process['pid']}) has ended without an error message, while "
                    "ranks were setting up. It was killed (SIGKILL, out of host memory), crashed or called exit()."
                )
        self._report(store)

    def _report(self, store: _StartupStore | None) -> None:
        waited = time.monotonic() - self._began
        if self._joined or waited < self._report_s:
            return
        self._report_s *= 10
        detail = "The store there does not answer: rank 0, or the launcher, which serves it, has not started."
        if store is not None:
            missing = [rank for rank in range(self._world_size) if not self._has_announced(store, rank)]
            if not missing:
                return
            detail = f"Not there yet: {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}."
        self._say(
            f"No progress. This is rank {self._rank}, which has waited for {waited:.0f} s for {self._world_size} ranks "
            f"to join the process group at {':'.join(map(str, self._served_at))}. {detail}"
        )

    def _has_announced(self, store: _StartupStore, rank: int) -> bool:
        return store.has("here", rank) if rank not in self._neighbours else store.read("here", rank) is not None

    def _say(self, text: str) -> None:
        # one call, so that lines of ranks do not mix
        os.write(2, f"[lightning_zero, rank {self._rank}] {text}\n".encode())

    def _end(self, text: str) -> None:
        self._say(f"{text}\nThis is rank {self._rank}, setting up. It cannot continue alone and ends too.")
        kill_compilers()
        os._exit(1)


def own_process() -> dict[str, Any]:
    """Return host, pid namespace, pid and start time (ticks since boot) of this process.

    Host is empty if /proc does not show the process under its own pid.
    """
    pid, unknown = os.getpid(), {"host": "", "pid": os.getpid(), "started": "0"}
    with suppress(OSError):
        stat = _process_stat(pid)
        if stat is None or os.readlink("/proc/self") != str(pid) or not boot_id():
            return unknown
        return {
            "host": f"{host_name()} {os.readlink('/proc/self/ns/pid')}",
            "pid": pid,
            "started": stat[19],
        }
    return unknown


def has_ended(process: dict[str, Any]) -> bool:
    """Return True if the process of :func:`own_process` ran on this host and has ended."""
    if not process["host"] or process["host"] != own_process()["host"]:
        return False
    stat = _process_stat(process["pid"])
    return stat is None or stat[0] in "ZX" or stat[19] != process["started"]


def _process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None
