"""Snapshots on a CPU as on a GPU whose copies are as late as allowed.

They run when other code is about to write their source, or stops waiting for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lightning_zero.checkpoint.async_save import snapshot
from lightning_zero.checkpoint.async_save.saver import AsyncSaver
from lightning_zero.checkpoint.async_save.snapshot import Snapshot

__all__ = ["late_copies"]

AT_LAST_S = 5.0


class Late:
    """In the place of threads; of all snapshots inside."""

    def __init__(self, *args: Any) -> None:
        self._jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        self._now = threading.Event()

    @property
    def waiting(self) -> bool:
        """Return True if there are copies that were not made yet."""
        return bool(self._jobs)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        self._now.clear()
        self._jobs.append((Future(), fn, args))
        return self._jobs[-1][0]

    def make(self) -> None:
        """Those that wait."""
        with self._lock:
            while self._jobs:
                future, fn, args = self._jobs.pop(0)
                future.set_result(fn(*args))
        self._now.set()

    def shutdown(self) -> None:
        self.make()

    def await_writer(self) -> None:
        self._now.wait(AT_LAST_S)
        self.make()


@contextmanager
def late_copies() -> Iterator[Late]:
    """Apply to the engines that are made inside."""
    late, made = Late(), Snapshot.__init__
    before_writing, write = Snapshot.before_writing, AsyncSaver._write

    def writing(self: Snapshot) -> None:
        late.make()
        before_writing(self)

    def written(self: AsyncSaver, *args: Any) -> Any:
        late.await_writer()
        return write(self, *args)

    with (
        patch.object(Snapshot, "__init__", lambda self, device: made(self, device, True)),
        patch.object(snapshot, "ThreadPoolExecutor", lambda *args: late),
        patch.object(Snapshot, "before_writing", writing),
        patch.object(AsyncSaver, "_write", written),
    ):
        yield late
