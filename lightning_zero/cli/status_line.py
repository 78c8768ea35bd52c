"""Show on stderr what a slow command does now, and for how long it has run.

The module imports neither torch nor Lightning, so that it can report their import.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

TERMINAL_S = 0.5  # between updates of the line
PLAIN_S = 10.0  # between lines where there is no terminal, so that logs stay short
CLEAR = "\r\x1b[K"


class StatusLine:
    """One line on a terminal, which a thread updates; elsewhere a line every ten seconds at most."""

    def __init__(
        self, title: str, stream: TextIO | None = None, terminal_s: float = TERMINAL_S, plain_s: float = PLAIN_S
    ) -> None:
        # Python has no stderr if the caller has closed it.
        self._title, self._stream = title, stream or sys.stderr or io.StringIO()
        self._is_terminal = self._stream.isatty()
        self._interval_s = terminal_s if self._is_terminal else plain_s
        self._text, self._begin = "", time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-status", daemon=True)

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, text: str) -> None:
        """Set the current activity."""
        with self._lock:
            self._text = text
            if self._is_terminal:
                self._show()

    def log(self, line: str, *values: object) -> None:
        """Print a line that stays. Arguments are those of a logger's methods."""
        self.note(line % values if values else line)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the line. Idempotent."""
        with self._lock:
            if not self._closed.is_set():
                self._clear()
            self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with self._lock:
                if not self._closed.is_set():
                    self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._begin
        line = f"{self._title}: {self._text} ({seconds:.0f} s)"
        print(f"{CLEAR}{line}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=self._stream)
        self._stream.flush()

    def _clear(self) -> None:
        if self._is_terminal:
            print(CLEAR, end="", file=self._stream, flush=True)
