"""Ranks look after each other from their first moment: before they have a process group, and while one of them builds
the C++ executor, whose watchdog takes over from there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

__all__ = ["StartupWatch"]

TICK_S = 0.5
TO_FAIL_S = 3.0  # that a rank gets to fail by itself once another has
TO_COME_S = 1.0  # to the store, before anything else is done: who was never seen cannot be missed at once
TO_TELL_S = 2.0
STORE_GONE_S = 5.0
CONNECTION_S = 10.0


class StartupWatch:
    """A thread that tells the other ranks that this one is there, and ends the process when one of them is gone.

    It is a client of its own of the key-value store by which the process group meets, so it neither needs one nor
    counts as one of those that meet.

    Args:
        address, port: where the store is served, or will be.
        report_s: seconds after which a rank that waits for others to join says for which.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, report_s: float) -> None:
        self._address, self._port = address, port
        self._rank, self._world_size, self._report_s = rank, world_size, report_s
        self._over, self._here, self._told = threading.Event(), threading.Event(), threading.Event()
        self._failure: str | None = None
        self._joined = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-startup", daemon=True)
        self._thread.start()
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # otherwise this rank is to serve it
            self._here.wait(TO_COME_S)

    def joined(self) -> None:
        """This rank is in the process group."""
        self._joined = True

    def fail(self, error: BaseException) -> None:
        """An exception ends this rank: the others hear of it."""
        lines = str(error).strip().splitlines()
        self._failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self._over.set()
        self._told.wait(TO_TELL_S)

    def close(self) -> None:
        """Something else looks after the ranks from now on."""
        self._over.set()
        self._told.wait(TO_TELL_S)

    def _run(self) -> None:
        try:
            store = self._connect()
            if store is None:
                return
            store.set(f"here/{self._rank}", json.dumps(_process()))
            self._here.set()
            others = {rank: _Other() for rank in range(self._world_size) if rank != self._rank}
            lost_since = None
            while not self._over.wait(TICK_S):
                try:
                    self._look(store, others)
                    lost_since = None
                except RuntimeError:  # what a store raises whose server is gone
                    now = time.monotonic()
                    lost_since = lost_since or now
                    if now - lost_since > STORE_GONE_S and not self._over.is_set():
                        self._end(
                            "The key-value store through which ranks find each other is gone: the process that serves "
                            "it, rank 0's or the launcher, has ended. Look for its error first."
                        )
            what, text = ("left", "") if self._failure is None else ("failed", self._failure)
            store.set(f"{what}/{self._rank}", text)
        except RuntimeError:
            pass  # nobody is left to be told
        finally:
            self._here.set()
            self._told.set()

    def _connect(self) -> Store | None:
        while True:
            # Asked first whether anybody answers: the store's own client would complain until then.
            with suppress(OSError), socket.create_connection((self._address, self._port), timeout=CONNECTION_S):
                break
            if self._over.wait(TICK_S):
                return None
            self._report(None)
        patience = timedelta(seconds=CONNECTION_S)
        store = TCPStore(
            self._address,
            self._port,
            None,
            is_master=False,
            timeout=patience,
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives an attempt
        return PrefixStore(f"lightning_zero/startup/{attempt}", store)

    def _look(self, store: Store, others: dict[int, _Other]) -> None:
        for rank, other in list(others.items()):
            if store.check([f"left/{rank}"]):
                del others[rank]
            elif store.check([f"failed/{rank}"]):
                if not self._over.wait(TO_FAIL_S):
                    self._end(f"Rank {rank} failed: {store.get(f'failed/{rank}').decode()}")
                return
            else:
                if other.process is None and store.check([f"here/{rank}"]):
                    other.process = json.loads(store.get(f"here/{rank}"))
                if other.process is not None and _is_gone(other.process):
                    if store.check([f"left/{rank}"]) or store.check([f"failed/{rank}"]):
                        continue  # it has said so a moment ago
                    self._end(
                        f"The process of rank {rank} (number {other.process['pid']}) is gone without a word, while "
                        "ranks were setting up. It was killed (SIGKILL, out of host memory), it crashed, or it called "
                        "exit()."
                    )
        self._report(sorted(rank for rank, other in others.items() if other.process is None))

    def _report(self, missing: list[int] | None) -> None:
        waited = time.monotonic() - self._began
        if self._joined or waited < self._report_s or missing == []:
            return
        self._report_s *= 10
        who = "The store there does not answer: rank 0, or the launcher, which serves it, has not come."
        if missing:
            who = f"Not there yet: {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}."
        self._say(
            f"No progress. This is rank {self._rank}, which has waited for {waited:.0f} s for {self._world_size} ranks "
            f"to join the process group at {self._address}:{self._port}. {who}"
        )

    def _say(self, text: str) -> None:
        os.write(2, f"[lightning_zero, rank {self._rank}] {text}\n".encode())  # one call, so that lines do not mix

    def _end(self, text: str) -> None:
        self._say(f"{text}\nThis is rank {self._rank}, setting up. It cannot go on alone, and ends, too.")
        _end_descendants()
        os._exit(1)


class _Other:
    process: dict[str, Any] | None = None


def _process() -> dict[str, Any]:
    """What others need to find this process: machine, namespace, number, and when it was started."""
    pid = os.getpid()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        stat = _stat(pid)
        return {"host": boot + os.readlink("/proc/self/ns/pid"), "pid": pid, "started": stat[19] if stat else ""}
    return {"host": "", "pid": pid, "started": ""}


def _is_gone(process: dict[str, Any]) -> bool:
    if not process["host"] or process["host"] != _process()["host"]:
        return False
    stat = _stat(process["pid"])
    return stat is None or stat[0] in "ZX" or stat[19] != process["started"]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat behind the name, which may hold anything: state, parent, ..."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def _end_descendants() -> None:
    """Kills what this process has started, compilers above all. Not the ranks that Lightning's launcher has started."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
                children.setdefault(int(stat[1]), []).append(int(entry.name))
    own = _local_rank(os.getpid())
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if _local_rank(child) == own:
                waiting.append(child)
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)


def _local_rank(pid: int) -> bytes | None:
    """As it was when the process was started."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(b"LOCAL_RANK="):
                return line
    return None
