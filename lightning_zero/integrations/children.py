"""The processes that a launcher has started, as seen by the process that started them: rank 0 of each node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from lightning_zero.native.host_process import kill_compilers

__all__ = ["ChildWatch", "terminate_after_grace"]

POLL_S = 0.2
# For which a process may end by itself once another rank has failed: its watchdog takes 3 s to raise, and 4 s more to
# end what does not raise.
TO_END_S = 8.0


class ChildWatch(threading.Thread):
    """Ends this process, with a message, if one that it has started fails and it does not end by itself.

    Lightning's own observer kills all of them at once by SIGKILL: no rank could say which one has failed, and why.

    Args:
        children: In the order of their ranks.
        first_rank: The rank of this process.
    """

    def __init__(
        self, children: Sequence[subprocess.Popen[bytes]], first_rank: int, to_end_s: float = TO_END_S
    ) -> None:
        super().__init__(name="lightning_zero-children", daemon=True)
        self._children, self._first_rank, self._to_end_s = list(children), first_rank, to_end_s

    def run(self) -> None:
        while any(child.poll() is None for child in self._children) and not self._failed():
            time.sleep(POLL_S)
        failed = self._failed()
        if failed:
            time.sleep(self._to_end_s)  # this is a daemon: it ends with the process
            self._end(min(failed))

    def _failed(self) -> list[int]:
        return [number for number, child in enumerate(self._children) if child.poll()]

    def _end(self, number: int) -> None:
        child, own = self._children[number], self._first_rank
        text = (
            f"[lightning_zero, rank {own}] The process of rank {own + 1 + number} (number {child.pid}) "
            f"{_how(child.returncode)}. Look for its error first. This is rank {own}, which has started it. It cannot "
            f"go on without it, did not end by itself within {self._to_end_s:.0f} s, and is ended now.\n"
        )
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        for other in self._children:
            other.kill()
        kill_compilers()
        os._exit(1)


def terminate_after_grace(children: Sequence[subprocess.Popen[bytes]], to_end_s: float = TO_END_S) -> None:
    """Wait until these processes, whose watchdogs know of a failure, have ended; then kill what is left."""
    deadline = time.monotonic() + to_end_s
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
