"""The text of a failed call: every rank's traceback, Python stack and last output."""

import contextlib
import os
import signal
import time
from pathlib import Path

LOG_LINES = 40
STACK_LINES = 150


class RankFailure(AssertionError):
    """A rank raised, died, or left a collective unfinished."""


class RankDeadline(RankFailure):
    """The ranks were not done by the deadline."""


def tail(path: Path, offset: int, lines: int) -> str:
    """The last lines written to `path` since `offset`."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    kept = text.rstrip().splitlines()
    cut = [f"[{len(kept) - lines} lines left out]"] if len(kept) > lines else []
    return "\n".join(cut + kept[-lines:])


def exit_words(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def request_stacks(stacks: dict[int, Path], wait: float = 10.0) -> None:
    """Have each process (pid -> file) write its stacks; return when the files stopped growing."""
    before = {pid: size(path) for pid, path in stacks.items()}
    for pid in stacks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + wait
    last = dict(before)
    while time.monotonic() < end:
        time.sleep(0.1)
        now = {pid: size(path) for pid, path in stacks.items()}
        if now == last and all(now[pid] > before[pid] for pid in stacks):
            return
        last = now
