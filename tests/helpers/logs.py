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

import torch.distributed as dist

__all__ = ["logged", "said_by", "stderr", "stderr_of_ranks", "wait_until"]


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


@contextmanager
def stderr_of_ranks() -> Iterator[list[Path]]:
    """Return the standard error of each rank. Collective."""
    with stderr() as said:
        paths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, said)
        yield paths


def wait_until(test: Callable[[], bool], limit_s: float = 40.0) -> None:
    """Return as soon as ``test`` returns True, or after the limit."""
    end = time.monotonic() + limit_s
    while not test() and time.monotonic() < end:
        time.sleep(0.05)


def said_by(job: Callable[[], Any]) -> tuple[str, float]:
    """Return this process's standard error in the context, and its seconds."""
    with stderr() as said:
        begun = time.monotonic()
        job()
        return said.read_text(), time.monotonic() - begun
