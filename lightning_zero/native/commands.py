"""Commands that run side by side, and can be stopped from another thread: a compiler, with what it starts."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["CommandRunner", "BuildCancelled", "children", "end", "process_stat"]

Finished = subprocess.CompletedProcess[str]


class BuildCancelled(Exception):
    """Somebody has said that nobody wants the results."""


class CommandRunner:
    """Runs commands for one caller. Threads are daemons: a program that ends does not wait for a compiler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._stopped = threading.Event()

    def run(self, command: list[str]) -> Finished:
        """The command's end, with what it wrote, as text.

        Raises:
            OSError: it cannot be started.
            Stopped: somebody has called :meth:`stop`.
        """
        with self._lock:
            self.check()
            pipe = subprocess.PIPE
            # A group of its own: what it starts while it is being ended ends, too.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._running.add(process.pid)
        try:
            out, err = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process.pid)
        self.check()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def all(self, commands: Iterable[list[str]], run: Callable[[list[str]], object]) -> None:
        """``run`` of each, as many at a time as there are cores. Raises what the first one raised that failed; those
        that have not begun then do not."""
        waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        for command in commands:
            waiting.put(command)
        errors: list[BaseException] = []

        def work() -> None:
            with suppress(queue.Empty):
                while not errors:
                    command = waiting.get_nowait()
                    try:
                        run(command)
                    except BaseException as error:
                        errors.append(error)

        count = min(os.cpu_count() or 1, waiting.qsize())
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C, which does not reach other groups
            self.stop()
            raise
        if errors:
            raise errors[0]

    def check(self) -> None:
        """Raises :class:`BuildCancelled` once somebody has called :meth:`stop`."""
        if self._stopped.is_set():
            raise BuildCancelled

    def stop(self) -> None:
        """Ends what runs, and what that has started. Harmless when repeated."""
        with self._lock:
            self._stopped.set()
            for process in self._running:
                with suppress(OSError):
                    os.killpg(process, signal.SIGTERM)


def process_stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat behind the name, which may hold anything: state, parent, ..."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def children() -> dict[int, list[int]]:
    """The processes of this machine by their parents; empty where there is no /proc."""
    found: dict[int, list[int]] = {}
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (stat := process_stat(int(entry.name))) is not None:
                found.setdefault(int(stat[1]), []).append(int(entry.name))
    return found


def end(processes: Iterable[int]) -> None:
    """Kills these and all that they have started."""
    waiting, of = list(processes), children()
    while waiting:
        process = waiting.pop()
        waiting += of.get(process, [])
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
