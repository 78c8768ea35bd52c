"""A rank's logs and output, for tests that need them: pytest's own captures are of its process."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["logged", "said_by", "stderr"]


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Collect the messages of that logger and those below it, from DEBUG on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


@contextmanager
def stderr() -> Iterator[Path]:
    """Return this process's standard error, C++ included."""
    with tempfile.NamedTemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(before, 2)
            os.close(before)


def said_by(job: Callable[[], Any]) -> tuple[str, float]:
    """Return this process's standard error in the context, and its seconds."""
    with stderr() as said:
        begun = time.monotonic()
        job()
        return said.read_text(), time.monotonic() - begun
