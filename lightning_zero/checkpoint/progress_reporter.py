"""Report the progress of saves and loads: to the user as a bar or as lines, and to the other ranks.

The watchdogs of ranks that wait do not time out while :class:`ProgressReporter` reports progress.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_zero.config.text import format_bytes
from lightning_zero.task_progress import FIRST_LINE_S, LINE_INTERVAL_S

RANKS_INTERVAL_S = 0.5  # watchdogs poll no more often


ShowBar = Callable[[str, int], Any]  # returns a tqdm bar for a description and the total bytes


class ProgressReporter:
    """Report bytes, from any thread, until its context ends.

    Args:
        task: such as ``"Saving run/last.ckpt"``.
        verb: past participle for bytes, such as ``"written"``.
        print_line: shows a line to the user; None: do not.
        bar: a tqdm bar instead of lines.
        total_bytes: of the task.
        report_to_ranks: sends the progress to the watchdogs of other ranks; ``""`` at the end.
    """

    def __init__(
        self,
        task: str,
        verb: str,
        print_line: Callable[[str], None] | None,
        bar: Any = None,
        total_bytes: int = 0,
        report_to_ranks: Callable[[str], None] | None = None,
    ) -> None:
        self._task, self._verb, self._print_line, self._bar = task, verb, print_line, bar
        self._total, self._report_to_ranks = total_bytes, report_to_ranks
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._due = self._begun + min(FIRST_LINE_S, LINE_INTERVAL_S)
        self._reported_at = -math.inf
        self._bytes = 0

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._bytes += count
            if self._report_to_ranks is not None and now - self._reported_at >= RANKS_INTERVAL_S:
                self._reported_at = now
                self._report_to_ranks(self._status())
            if self._bar is not None:
                self._bar.update(count)
                return
            due = now >= self._due
            if due:
                self._due = now + LINE_INTERVAL_S
        if due and self._print_line is not None:
            done = format_bytes(self._bytes) + (f" of {format_bytes(self._total)}" if self._total else "")
            self._print_line(f"{self._task}: {now - self._begun:.0f} s (this rank has {self._verb} {done})")

    def _status(self) -> str:
        done, total = map(format_bytes, (self._bytes, self._total))
        return f"{self._task[:1].lower()}{self._task[1:]} ({done} of {total} {self._verb})"

    def __enter__(self) -> ProgressReporter:
        if self._report_to_ranks is not None:
            self._report_to_ranks(self._status())
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._report_to_ranks is not None:
            with self._lock:  # another thread may still report
                self._report_to_ranks("")
                self._report_to_ranks = None


def silent_progress(total_bytes: int) -> ProgressReporter:
    """Return a reporter that reports nothing."""
    return ProgressReporter("", "", None)
