"""Watch and end the processes that a launcher has started; used by their parent, rank 0 of each node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from lightning_zero.native.build import kill_compilers

POLL_S = 0.2
# For a process to end after another rank has failed: its watchdog raises within 3 s, and ends the process 4 s later.
GRACE_S = 8.0


class ChildWatch(threading.Thread):
    """End this process with a message if a child process fails, after a grace period.

    Lightning's own observer sends SIGKILL to all children at once, so no rank could say which one has failed, and why.

    Args:
        grace_s: for this process to end by itself.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]], first_rank: int, grace_s: float = GRACE_S) -> None:
        super().__init__(name="lightning_zero-children", daemon=True)
        self._children, self._first_rank, self._grace_s = list(children), first_rank, grace_s

    def run(self) -> None:
        while any(child.poll() is None for child in self._children) and not self._failed():
            time.sleep(POLL_S)
        failed = self._failed()
        if failed:
            time.sleep(self._grace_s)  # as a daemon thread, this ends with the process
            self._end(min(failed))

    def _failed(self) -> list[int]:
        return [number for number, child in enumerate(self._children) if child.poll()]

    def _end(self, number: int) -> None:
        child, own = self._children[number], self._first_rank
        text = (
            f"[lightning_zero, rank {own}] The process of rank {own + 1 + number} (number {child.pid}) "
            f"{_how(child.returncode)}. Look for its error first. This is rank {own}, which has started it. It cannot "
            f"go on without it, did not end by itself within {self._grace_s:.0f} s, and is ended now.\n"
        )
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        for other in self._children:
            other.kill()
        kill_compilers()
        os._exit(1)


def terminate_after_grace(children: Sequence[subprocess.Popen[bytes]], grace_s: float = GRACE_S) -> None:
    """Wait until the processes have ended after a failure, and kill the others after the grace period."""
    deadline = time.monotonic() + grace_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for child in children:
        child.kill()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
