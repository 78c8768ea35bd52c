"""A handle on the C++ watchdog: what this rank does, what it waits for, and how it ends when others cannot go on.

See ``csrc/watchdog/watchdog.h`` for what it does with that.
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

__all__ = ["SequenceId", "Phase", "Watchdog"]


SPINS, NAP_S = 200, 0.0005  # of a wait
VERDICT_WAIT_S = 6.0  # by when it is known who broke a connection


class Phase(enum.IntEnum):
    """What a rank is doing; in the order of the C++ enum of that name."""

    OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION = range(7)


class SequenceId(enum.IntEnum):
    """Collectives that come in one order on all ranks, so that they can be counted: those of one process group, and
    Lightning's own (WORLD). The first ones of the C++ enum of that name."""

    UNCOUNTED, CONTROL, WORLD, GATHER, REDUCE = range(-1, 4)


class Watchdog:
    """Watches over the waits of this rank for others.

    Args:
        mesh: of the ranks; the key-value store of its control group is what they talk through.
        report_s: a wait that takes longer, in seconds, is reported on every rank; one that takes longer than the mesh's
            timeout ends the process.
    """

    def __init__(self, mesh: Mesh, report_s: float) -> None:
        load()
        hosts = list(mesh.hosts) if mesh.host_count > 1 else []
        group_name = mesh.control_group.group_name
        self.native = torch.classes.lightning_zero.Watchdog(group_name, report_s, mesh.timeout_s, hosts)
        for group in mesh.device_groups:
            # An error that the group's own watchdog, NCCL's, has found ends this rank.
            self.native.watch_group(group.group_name)
        self._rank, self._world_size = mesh.rank, mesh.world_size
        self.failed = False  # whether an exception has ended the stage on this rank
        self._failures = Failures(mesh.store("failures"), mesh.rank, mesh.world_size) if mesh.world_size > 1 else None
        self._library = torch.library.Library("lightning_zero", "FRAGMENT")
        name = f"on_end_{id(self)}"
        self._library.define(f"{name}(str kind, str text) -> ()")
        self._library.impl(name, _raise, "CompositeExplicitAutograd")
        self.native.on_abort(f"lightning_zero::{name}")
        atexit.register(_close, weakref.ref(self))

    def configure(self, report_s: float) -> None:
        """A wait that takes longer, in seconds, is reported from now on; one that goes on now, too."""
        self.native.set_report_interval(report_s)

    def enter(self, phase: Phase) -> None:
        """This rank is in that phase from now on."""
        self.native.enter(int(phase))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Surrounds what may take its time: others who wait for this rank are told so, and do not worry."""
        self.native.busy(what)
        try:
            yield
        finally:
            self.native.busy("")

    def moved(self, how_far: str) -> None:
        """This rank is farther with what takes long, in words; "" when it is over. Nobody waits too long for that, nor
        is it reported, while it goes on."""
        self.native.moved(how_far)

    @contextmanager
    def waiting(self, what: str, sequence: SequenceId = SequenceId.UNCOUNTED) -> Iterator[None]:
        """Surrounds a wait for other ranks.

        Raises:
            RankFailedError, RankMismatchError: this rank must not go on.
        """
        wait = self.native.begin_wait(int(sequence), what)
        try:
            yield
        finally:
            self.native.end_wait(wait)

    def collective(self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None], waits: bool) -> None:
        """Starts a collective and waits for it. ``start`` is given whether to start it asynchronously.

        waits: whether the host waits, and not only the device

        Raises:
            RankFailedError, RankMismatchError: this rank must not go on, or wait any longer.
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
        """A stage begins, on all ranks: what failed before is over."""
        self.failed = False
        if self._failures is not None:
            self._failures.begin()
        self.native.begin_stage()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that an exception ends what this rank does, and show it, once for all that share it.

        It is shown at once, since the way out may be long.
        """
        self.failed = True
        if self._failures is None:
            return
        broken = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))
        if self.native.abort_reason() or (broken and self.wait_for_verdict()):
            # Another rank was the first to end, and the watchdog has said so.
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
        """Return True as soon as it is known which rank broke a connection; False if that takes too long."""
        self.native.skip_grace_period()
        end = time.monotonic() + VERDICT_WAIT_S
        while time.monotonic() < end:
            if self.native.abort_reason():
                return True
            time.sleep(0.05)
        return False

    def print_line(self, text: str) -> None:
        """Print a line of this rank to stderr, which does not mix with lines of others."""
        os.write(2, f"[lightning_zero, rank {self._rank}] {text}\n".encode())

    def check(self) -> None:
        """Raises what the watchdog has found, if this rank must not go on."""
        self.native.check()

    def close(self) -> None:
        """This rank leaves; others do not wait for it any more."""
        self.native.close()

    def leave(self) -> None:
        """The process ends."""
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
