"""Show the user that a long task is running.

A line is shown after 5 s, then every 10 s, and after a minute every 30 s.
:class:`TaskProgress` belongs to one process. A daemon thread shows the lines, because the thread that compiles or waits
cannot. Tasks may be nested: lines name the innermost task and count from the beginning of the outermost one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_LINE_S = 5.0  # shorter tasks need no line
LINE_INTERVAL_S = 10.0
LONG_AFTER_S, LONG_INTERVAL_S = 60.0, 30.0  # fewer lines in the logs of tasks of minutes


class TaskProgress:
    """Show lines such as ``Compiling 'net' for training: 15 s (forward)`` until the task ends.

    Args:
        show: shows a line; called from another thread. None: show nothing.
        clock: returns seconds.
        threaded: start a thread that calls :meth:`tick`; otherwise the caller does.
    """

    def __init__(
        self,
        show: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self._show, self._clock, self._threaded = show, clock, threaded
        self._lock = threading.RLock()
        self._tasks: list[str] = []
        self._stage = ""
        self._begun = self._due = 0.0
        self._ended: threading.Event | None = None

    def begin(self, task: str) -> None:
        """Begin a task, such as ``"Compiling 'net' for training"``."""
        if self._show is None:
            return
        with self._lock:
            self._tasks.append(task)
            self._stage = ""
            if len(self._tasks) > 1:
                return
            self._begun = self._clock()
            self._due = self._begun + FIRST_LINE_S
            if self._threaded:
                self._ended = threading.Event()
                name = "lightning_zero-progress"
                threading.Thread(target=self._run, args=(self._ended,), name=name, daemon=True).start()

    def stage(self, stage: str) -> None:
        """Set the part of the task that begins now, such as ``"forward"``."""
        self._stage = stage

    def end(self, depth: int | None = None) -> None:
        """End the innermost task, or all tasks above ``depth``."""
        with self._lock:
            del self._tasks[len(self._tasks) - 1 if depth is None and self._tasks else depth or 0 :]
            self._stage = ""
            if not self._tasks and self._ended is not None:
                self._ended.set()
                self._ended = None

    @contextmanager
    def task(self, task: str) -> Iterator[None]:
        """Return a context for a task. It also ends inner tasks whose end is missing after an error."""
        depth = len(self._tasks)
        self.begin(task)
        try:
            yield
        finally:
            self.end(depth)

    def tick(self) -> None:
        """Show a line if one is due."""
        with self._lock:
            now = self._clock()
            if not self._tasks or self._show is None or now < self._due:
                return
            self._due = now + (LINE_INTERVAL_S if now - self._begun < LONG_AFTER_S else LONG_INTERVAL_S)
            stage = f" ({self._stage})" if self._stage else ""
            line = f"{self._tasks[-1]}: {now - self._begun:.0f} s{stage}"
        self._show(line)  # without the lock: the handler of a log may wait for a terminal

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._due - self._clock(), 0.05)):
            self.tick()
