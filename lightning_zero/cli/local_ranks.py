"""Run ranks on this machine, as torchrun does, with a deadline.

All ranks and their processes end before :func:`run_ranks` returns or raises. A shell ends them if this process is
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

EXIT_GRACE_S = 10.0  # after the failure of a rank, for the messages of the others
POLL_S = 0.05
LAST_LINES = 12
# Prefixes of variables that are removed: a rank must not think that it belongs to the job of this process.
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "LSB_")


@dataclass(frozen=True)
class JobResult:
    """The end of a job.

    Attributes:
        status: exit status of each rank; None if it was killed at the deadline.
        outputs: stdout and stderr of each rank, in one text.
        seconds: duration.
        limit_s: the deadline, in seconds.
    """

    status: tuple[int | None, ...]
    outputs: tuple[str, ...]
    seconds: float
    limit_s: float

    @property
    def failed(self) -> str:
        """The last lines of the rank that failed; empty if none has failed."""
        bad = [rank for rank, status in enumerate(self.status) if status not in (0, None)]
        if bad:
            rank = bad[0]
            return f"rank {rank} ended with status {self.status[rank]}: {self._last(rank)}"
        stuck = [rank for rank, status in enumerate(self.status) if status is None]
        if stuck:
            ranks = ", ".join(map(str, stuck))
            # The reason is last, because tables show only the last line, which is the message of an exception.
            return f"{self._last(stuck[0])}\nnot over after {self.limit_s:g} s (ranks {ranks})"
        return ""

    def _last(self, rank: int) -> str:
        return "\n".join(self.outputs[rank].strip().splitlines()[-LAST_LINES:])


def run_ranks(
    arguments: Sequence[str], world_size: int, limit_s: float, environment: Mapping[str, str] | None = None
) -> JobResult:
    """Run ``python ARGUMENTS`` once for each rank.

    Args:
        arguments: as in ``["-m", "package.module", "--option"]``.
        world_size: number of ranks, all on this machine.
        limit_s: seconds after which ranks are killed.
        environment: variables to add to those of this process.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(world_size)]
        # This process serves the store, as torchrun's agent does, so that no other process takes its port.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with ExitStack() as running:
            processes: list[subprocess.Popen[bytes]] = []
            running.callback(_end, processes)
            for rank, file in enumerate(files):
                own = _environment(rank, world_size, store.port) | dict(environment or {})
                processes.append(_start(arguments, own, file))
            running.callback(_stop_reaper, _start_reaper(processes))
            status = _wait(processes, begun + limit_s)
        outputs = tuple(_read(file) for file in files)
    return JobResult(status, outputs, time.monotonic() - begun, limit_s)


def _start(arguments: Sequence[str], environment: dict[str, str], file: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that the processes that it starts are killed with it
    )


def _start_reaper(processes: Sequence[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a shell that kills the ranks and their children when this process ends, by SIGKILL, too.

    It reads a pipe that only this process holds open.
    """
    groups = [str(process.pid) for process in processes]
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read line; for group; do kill -s KILL -- "-$group"; done', "sh", *groups],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the group of this process must not end it
    )


def _stop_reaper(reaper: subprocess.Popen[bytes]) -> None:
    """Stop the shell before ranks end, after which other processes may get their ids."""
    reaper.kill()
    reaper.communicate()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    # Ranks import the same package as this process, from any working directory.
    home = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [home, kept.get("PYTHONPATH", "")]))
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "lightning_zero",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[int | None, ...]:
    while True:
        status = tuple(process.poll() for process in processes)
        if all(code is not None for code in status) or time.monotonic() > deadline:
            return status
        if any(status):  # one has failed
            deadline = min(deadline, time.monotonic() + EXIT_GRACE_S)
        time.sleep(POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
