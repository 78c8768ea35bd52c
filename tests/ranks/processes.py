"""Facts of Linux about processes that need not be our children, if they live, how they ended, and their children."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["asleep", "command", "ended", "exit_code", "kill_session", "members"]

STATE, SESSION, EXIT_CODE = 0, 3, 49  # in /proc/PID/stat, counted from the end of the name


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def ended(pid: int) -> bool:
    """Include a process that was not waited for."""
    stat = _stat(pid)
    return stat is None or stat[STATE] in "ZX"


def asleep(pid: int) -> bool:
    """Return False for a process that would go on if it had a core, or the disk, or were not stopped."""
    stat = _stat(pid)
    return stat is None or stat[STATE] not in "RDT"


def exit_code(pid: int) -> int | None:
    """As subprocess's; only between the process's end and its being reaped."""
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[EXIT_CODE])) if stat is not None and stat[STATE] in "ZX" else None


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        stat = _stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[STATE] not in "ZX" and int(stat[SESSION]) == session:
            found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    end = time.monotonic() + 10
    while (left := members(session)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
