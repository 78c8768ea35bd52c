"""Handle of the C++ watchdog, and failure reports of ranks.

:class:`Watchdog` reports this rank's phase and waits to ``csrc/runtime/watchdog.h``, which ends the rank if others
cannot continue. :class:`Failures` prints an exception that several ranks share once.
"""

from __future__ import annotations

import atexit
import enum
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.errors import RankFailedError, RankMismatchError
from lightning_zero.mesh import Mesh
from lightning_zero.native.failures import Failures, mark_shown
from lightning_zero.native.load import load

__all__ = ["Phase", "SequenceId", "Watchdog"]


SPINS, NAP_S = 200, 0.0005  # polls of a collective before it sleeps, and its sleep
VERDICT_WAIT_S = 6.0  # until it is known which rank broke a connection


class Phase(enum.IntEnum):
    """Phase of a rank, in the order of the C++ enum."""

    OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION = range(7)


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
        native: The C++ watchdog.
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
        self.native.on_end(f"lightning_zero::{name}")
        atexit.register(_close, weakref.ref(self))

    def configure(self, report_s: float) -> None:
        """Report waits that take longer than this, in seconds, including present ones."""
        self.native.set_report(report_s)

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
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
        """Surround a wait for other ranks.

        Raises:
            RankFailedError, RankMismatchError: This rank must not continue.
        """
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
            what: Description.
            sequence: Its sequence.
            start: Starts the collective; passed True if it must be asynchronous.
            waits: True if the host waits, and not only the device.

        Raises:
            RankFailedError, RankMismatchError: This rank must not continue, or not wait any longer.
        """
        with self.waiting(what, sequence):
            work = start(waits)
            if work is None:
                return
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
        self.native.begin()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that an exception ends this one, and show it once for all that share it.

        It is shown at once, since unwinding may take long.
        """
        self.failed = True
        if self._failures is None:
            return
        broken = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))
        if self.native.verdict() or (broken and self.wait_for_verdict()):
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
        self.native.hurry()
        end = time.monotonic() + VERDICT_WAIT_S
        while time.monotonic() < end:
            if self.native.verdict():
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
        if self._failures is not None and serves and self.failed and not self.native.verdict():
            self._failures.wait_until_acknowledged()
        self.native.leave()


def _raise(kind: str, text: str) -> None:
    raise (RankMismatchError if kind == "mismatch" else RankFailedError)(text)


def _close(reference: weakref.ref[Any]) -> None:
    watchdog = reference()
    if watchdog is not None:
        watchdog.leave()
