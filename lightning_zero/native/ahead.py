"""Builds the C++ executor beside whatever a program does before its training needs it: data, the model, other ranks'
processes.

Protocol: ``ahead = BackgroundBuild(owner)``, which returns at once; ``ahead.finish()`` where the executor is needed. Until
then nothing is printed. If the owner goes away before that, or the process ends, so does the build: a strategy that is
made and never used leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_zero.native.build import build, is_built
from lightning_zero.native.commands import CommandRunner, BuildCancelled

__all__ = ["BackgroundBuild"]

log = logging.getLogger(__name__)

Build = Callable[..., Path]

TO_STOP_S = 5.0  # that compilers get to end, and their folder to be removed


class BackgroundBuild:
    """A thread of the first process of each host; other processes wait for what is built, as ever.

    Args:
        owner: what wants the executor.
        make: builds, see :func:`lightning_zero.native.build.build`.
        needed: whether there is something to build.

    Attributes:
        waits: whether there was, for this process or another of its host, until :meth:`finish` returns.
    """

    def __init__(self, owner: object, make: Build = build, needed: Callable[[], bool] | None = None) -> None:
        self._running: _BuildThread | None = None
        self.is_pending = needed() if needed is not None else not is_built()
        if _is_first_of_host() and self.is_pending:
            self._running = _BuildThread(make)
            weakref.finalize(owner, self._running.stop)

    def finish(self) -> float:
        """Waits for the build, if there is one, and shows what it has to say. Harmless when repeated.

        Returns:
            Seconds that this took.

        Raises:
            NativeBuildError: what the build raised.
        """
        running, self._running = self._running, None
        begun = time.monotonic()
        # A process that was forked from the one that builds has no such thread, and waits by the cache's lock.
        if running is not None and running.process == os.getpid():
            running.wait()
        self.is_pending = False
        return time.monotonic() - begun


class _BuildThread:
    """Knows nothing of its owner."""

    def __init__(self, make: Build) -> None:
        self.process = os.getpid()
        self._commands = CommandRunner()
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._held: list[tuple[Any, ...]] | None = []  # what is said before anybody wants to know
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), name="lightning_zero-build", daemon=True)
        self._thread.start()

    def _run(self, make: Build) -> None:
        try:
            make(report=self._report, commands=self._commands)
        except BuildCancelled:
            pass
        except Exception as error:
            self._error = error

    def _report(self, *line: Any) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
                return
        log.warning(*line)

    def wait(self) -> None:
        if self._thread.is_alive():
            with self._lock:
                held, self._held = self._held or [], None
            for line in held:
                log.warning(*line)
            log.info("The C++ executor has been building for %.0f s.", time.monotonic() - self._begun)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        if self.process == os.getpid() and self._thread.is_alive():
            self._commands.stop()
            self._thread.join(TO_STOP_S)


def _is_first_of_host() -> bool:
    """As far as launchers tell before processes meet."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))
