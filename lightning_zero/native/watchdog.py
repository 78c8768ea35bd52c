"""Handle of the C++ watchdog, and failure reports of ranks.

:class:`Watchdog` reports this rank's phase and waits to ``csrc/watchdog/watchdog.h``, which ends the rank if others
cannot continue. :class:`Failures` prints an exception that several ranks share once.
"""

from __future__ import annotations

import atexit
import enum
import hashlib
import io
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from lightning_zero.errors import RankFailedError, RankMismatchError
from lightning_zero.mesh import Mesh
from lightning_zero.native.load import load

TO_POST_S = 1.0  # for posts of other ranks; short, because users wait for the traceback
TO_HEAR_S = 4.5  # for which the rank that serves the store stays alive: the others poll every 0.5 s and end after 3 s
TO_CLAIM_S = 0.5  # for which a rank leaves the traceback to a lower rank
POLL_S = 0.05
STORE_TIMEOUT = timedelta(seconds=5)
SHOWN = "_zero_shown"  # attribute of an exception: where its traceback is printed
# Numbers of ranks, devices and addresses in a message, which differ between ranks for the same exception.
OWN = re.compile(r"0x[0-9a-f]+|\b(rank|cuda|gpu|device|process)([ :=#_]*)\d+", re.IGNORECASE)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Failures:
    """Shows an exception that several ranks share once, with the list of these ranks.

    A failing rank posts a digest of its exception in the ranks' key-value store and waits briefly for the posts of the
    others. The first rank that claims a digest prints the traceback for all ranks with it. A process that ends by an
    exception that was shown only names it. Exit codes and exceptions do not change.

    Args:
        store: Store of these ranks. It is cloned: a thread that waits in a store's client blocks other threads.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_TIMEOUT)
        self._rank, self._ranks = rank, range(world_size)
        self._stage = 0

    def begin(self) -> None:
        """Begin a stage on all ranks: earlier failures are over."""
        self._stage += 1

    def show(self, error: BaseException) -> None:
        """Print the traceback unless a rank with the same exception prints it. Not collective."""
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
        """Report that this rank knows of another rank's failure."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(self._key("hears", self._rank), "")

    def wait_until_acknowledged(self) -> None:
        """Wait briefly until the other ranks have failed, too, or know of this rank's failure.

        For the process that serves the store, before it ends: the others would only find the store closed.
        """
        deadline, missing = time.monotonic() + TO_HEAR_S, set(self._ranks) - {self._rank}
        with suppress(RuntimeError):
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not (self._has("hears", rank) or self._has("of", rank))}
                time.sleep(POLL_S if missing else 0)

    def _share(self, digest: str) -> tuple[int, list[int]]:
        """Return the rank that prints the traceback, and the ranks for which it does."""
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
    """Replaces ``sys.excepthook``: only names an exception that was shown.

    The previous hook is always called, since a user's may do more than print. For a shown exception its output is
    dropped.
    """

    def __init__(self, before: Hook) -> None:
        self._before = before

    @classmethod
    def install(cls) -> None:
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
    """Mark ``error`` so that the end of this process only names it.

    ``where``: where its traceback is printed.
    """
    try:
        setattr(error, SHOWN, where)
    except AttributeError:  # a class without attributes is shown again
        return
    ShownErrorHook.install()


def _digest(error: BaseException) -> str:
    """Return a text that is equal on all ranks with the same exception: type, message and line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind, text = type(error), OWN.sub(r"\1", str(error))
    return hashlib.blake2s(f"{kind.__module__}.{kind.__qualname__}\0{text}\0{location}".encode()).hexdigest()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _failed(ranks: Sequence[int]) -> str:
    if len(ranks) < 2:
        return f"Rank {ranks[0]} failed"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} failed with one exception"


SPINS, NAP_S = 200, 0.0005  # polls of a collective before it sleeps, and its sleep
VERDICT_WAIT_S = 6.0  # until it is known which rank broke a connection


class Phase(enum.IntEnum):
    """Phase of a rank, in the order of the C++ enum."""

    OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION, USER_CODE = range(8)


class SequenceId(enum.IntEnum):
    """Sequence of counted collectives, which has one order on all ranks.

    Each process group has one, and Lightning's collectives (WORLD).

    The first values of the C++ enum.
    """

    UNCOUNTED, CONTROL, WORLD, GATHER, REDUCE = range(-1, 4)


class Watchdog:
    """Watches this rank's waits for other ranks.

    Args:
        mesh: Mesh of the ranks, which communicate through the key-value store of its control group.
        report_s: Each rank reports a wait that takes longer, in seconds. A wait longer than the mesh's timeout ends the
            process.

    Attributes:
        failed: True if an exception has ended the stage on this rank.
    """

    def __init__(self, mesh: Mesh, report_s: float) -> None:
        load()
        hosts = list(mesh.hosts) if mesh.host_count > 1 else []
        group_name = mesh.control_group.group_name
        self.native = torch.classes.lightning_zero.Watchdog(group_name, report_s, mesh.timeout_s, hosts)
        for group in mesh.device_groups:
            # An error found by the group's own watchdog (NCCL's) ends this rank.
            self.native.watch_group(group.group_name)
        self._rank, self._world_size = mesh.rank, mesh.world_size
        self.failed = False
        self._failures = Failures(mesh.store("failures"), mesh.rank, mesh.world_size) if mesh.world_size > 1 else None
        self._library = torch.library.Library("lightning_zero", "FRAGMENT")
        name = f"on_end_{id(self)}"
        self._library.define(f"{name}(str kind, str text) -> ()")
        self._library.impl(name, _raise, "CompositeExplicitAutograd")
        self.native.on_abort(f"lightning_zero::{name}")
        atexit.register(_close, weakref.ref(self))

    def configure(self, report_s: float) -> None:
        """Report waits that take longer than this, in seconds, including present ones."""
        self.native.set_report_interval(report_s)

    def enter(self, phase: Phase) -> None:
        self.native.enter(int(phase))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Surround a long task: ranks that wait for this one report it instead of a stall."""
        self.native.busy(what)
        try:
            yield
        finally:
            self.native.busy("")

    def moved(self, how_far: str) -> None:
        """Report the progress of a long task, or "" when it is over.

        Waits do not time out while it progresses.
        """
        self.native.moved(how_far)

    @contextmanager
    def waiting(self, what: str, sequence: SequenceId = SequenceId.UNCOUNTED) -> Iterator[None]:
        """Surround a wait for other ranks."""
        wait = self.native.begin_wait(int(sequence), what)
        try:
            yield
        finally:
            self.native.end_wait(wait)

    def collective(
        self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None], waits: bool
    ) -> None:
        """Start a collective and wait for it.

        Args:
            start: Starts the collective; passed True if it must be asynchronous.
            waits: True if the host waits, and not only the device.

        Raises:
            RankFailedError, RankMismatchError: This rank must not continue, or not wait any longer.
        """
        with self.waiting(what, sequence):
            work = start(waits)
            if work is not None:
                self._wait_for(work)

    def start_collective(
        self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None], waits: bool
    ) -> Callable[[], None]:
        """Start a collective; return a function that waits for it. All ranks must wait in the same order.

        Args: see :meth:`collective`.
        """
        work = start(True)
        assert work is not None

        def wait() -> None:
            with self.waiting(what, sequence):
                if waits:
                    self._wait_for(work)
                else:
                    work.wait()

        return wait

    def _wait_for(self, work: dist.Work) -> None:
        for tries in count():
            if work.is_completed():
                break
            self.check()
            time.sleep(0 if tries < SPINS else NAP_S)
        work.wait()

    def begin(self) -> None:
        """Begin a stage on all ranks: earlier failures are over."""
        self.failed = False
        if self._failures is not None:
            self._failures.begin()
        self.native.begin_stage()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that an exception ends this one, and show it once for all that share it.

        It is shown at once, since unwinding may take long.
        """
        self.failed = True
        if self._failures is None:
            return
        broken = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))
        if self.native.abort_reason() or (broken and self.wait_for_verdict()):
            # Another rank ended first, and the watchdog has reported it.
            self._failures.acknowledge()
            if isinstance(error, RankFailedError):
                mark_shown(error, "none, since another rank failed")
            return
        text = str(error).strip().splitlines()
        self.native.fail(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)
        if isinstance(error, KeyboardInterrupt):
            self._failures.acknowledge()
        else:
            self._failures.show(error)

    def wait_for_verdict(self) -> bool:
        """Return True as soon as it is known which rank broke a connection; False after a timeout."""
        self.native.skip_grace_period()
        end = time.monotonic() + VERDICT_WAIT_S
        while time.monotonic() < end:
            if self.native.abort_reason():
                return True
            time.sleep(0.05)
        return False

    def print_line(self, text: str) -> None:
        """Print a line of this rank to stderr in one write, so that lines of ranks do not mix."""
        os.write(2, f"[lightning_zero, rank {self._rank}] {text}\n".encode())

    def check(self) -> None:
        """Raise the watchdog's error if this rank must not continue."""
        self.native.check()

    def close(self) -> None:
        """Leave: other ranks do not wait for this one any more."""
        self.native.close()

    def leave(self) -> None:
        """End the process's part."""
        serves = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if self._failures is not None and serves and self.failed and not self.native.abort_reason():
            self._failures.wait_until_acknowledged()
        self.native.limit_exit_time()


def _raise(kind: str, text: str) -> None:
    raise (RankMismatchError if kind == "mismatch" else RankFailedError)(text)


def _close(reference: weakref.ref[Any]) -> None:
    watchdog = reference()
    if watchdog is not None:
        watchdog.leave()
