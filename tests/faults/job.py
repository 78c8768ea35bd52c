"""Starts the ranks of a job, watches them from the fault to their end, and leaves nothing of them behind.

``how``: the process that starts the ranks, and the one that serves their store.

``"torchrun"``: each rank has a process group of its own, and the parent serves the store, as torchrun's agent does.
``"rank0"``: likewise, but rank 0 serves the store, which dies with it.
``"lightning"``: the Trainer of rank 0 starts the others.

Unlike torchrun's agent, the parent ends no rank when another dies: the others have to notice it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import records
from tests.faults.injector import output_of
from tests.faults.records import Rank
from tests.faults.spec import VARIABLE, Fault, Orders, Training
from tests.helpers.ports import free_port
from tests.ranks import nursery, processes, report
from tests.ranks.pool import PRELOAD, REPO

__all__ = ["HOWS", "Job", "NeverReached", "Outcome"]

HOWS = ("torchrun", "rank0", "lightning")
MODULE = "tests.faults.script"
SHARED_MEMORY = Path("/dev/shm")
START_S = 180.0  # until the fault happens; importing and compiling take long where cores are scarce
WORKERS_NOTICE_S = 7.0  # a loader's workers look for their parent every 5 s


class NeverReached(AssertionError):
    """The fault did not happen: the training ended, or hung, before it."""


@dataclass
class Outcome:
    """
    Args:
        ranks: in order.
        left: processes that outlived all ranks.
        memory: files in shared memory that did.
        home: folder of all that the ranks wrote; the caller's to delete.
    """

    ranks: list[Rank]
    left: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    home: Path = Path()

    @property
    def seconds(self) -> float | None:
        """From the fault to the end of the last rank; None: some had to be killed."""
        ends = [rank.seconds for rank in self.ranks]
        return None if None in ends else max(end for end in ends if end is not None)


class Job:
    """One training, with a fault or without.

    Args:
        how: see the module.
        forked: from a process that has imported everything (quick); or started as users do, as ``"lightning"`` is.
    """

    def __init__(
        self,
        training: Training,
        fault: Fault | None = None,
        world: int = 2,
        how: str = "torchrun",
        forked: bool = False,
        checkpoint: str = "",
        meanwhile: Fault | None = None,
    ) -> None:
        assert how in HOWS, how
        self.how, self.world, self.forked = how, world, forked and how != "lightning"
        self.home = Path(tempfile.mkdtemp(prefix="faults-"))
        self.memory = Path(tempfile.mkdtemp(prefix="faults-", dir=SHARED_MEMORY))
        self.orders = Orders(str(self.home), training, fault, meanwhile, world, checkpoint)
        self.ranks = [Rank(self.home, number) for number in range(world)]
        self._sessions: list[int] = []
        self._store: Any = None
        self._processes: list[Any] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.memory, ignore_errors=True)
        if error is not None:  # no outcome has its position, and the error has the ranks' last lines
            shutil.rmtree(self.home, ignore_errors=True)

    def kill(self) -> None:
        """The ranks, and all processes that they have started."""
        for session in self._sessions:
            processes.kill_session(session)
        for process in self._processes:
            process.wait()

    def run(self, limit_s: float, start_s: float = START_S) -> Outcome:
        """Waits until all ranks have ended, ``limit_s`` after the fault (without one: after the start) at most.

        Raises:
            NeverReached: the ranks ended, or ``start_s`` passed, and the fault had not happened.
        """
        self._start()
        begun = time.monotonic()
        fired_at = None if self.orders.fault is not None else begun
        while True:
            now = time.monotonic()
            for number, rank in enumerate(self.ranks):
                process = self._processes[number] if number < len(self._processes) else None
                rank.look(process, fired_at)
            if fired_at is None:
                fired_at = records.fired(self.ranks)
            everybody = all(rank.over for rank in self.ranks) or (
                # a process that the Trainer of rank 0 should have started did not
                self.how == "lightning" and self.ranks[0].over and not self.ranks[1].pid and now - begun > 10
            )
            if fired_at is None and (everybody or now - begun > start_s):
                raise NeverReached(self._never(now - begun))
            if fired_at is not None and (everybody or now - fired_at > limit_s):
                break
            time.sleep(0.03)
        late = [rank for rank in self.ranks if not rank.over and rank.pid]
        report.request_stacks({rank.pid: output_of(self.home, rank.number, "stacks") for rank in late})
        for rank in self.ranks:
            rank.finish(fired_at)
        left = [] if late else self._left_behind()
        self.kill()
        memory = sorted(path.name for path in self.memory.iterdir())
        return Outcome(self.ranks, left, memory, self.home)

    def _left_behind(self) -> list[str]:
        end = time.monotonic() + (WORKERS_NOTICE_S if self.orders.training.workers else 1.0)
        while True:
            found = [pid for session in self._sessions for pid in processes.members(session)]
            if not found or time.monotonic() > end:
                return [f"{pid} {processes.command(pid)}" for pid in found]
            time.sleep(0.05)

    def _never(self, seconds: float) -> str:
        fault = self.orders.fault
        assert fault is not None
        late = {rank.pid: output_of(self.home, rank.number, "stacks") for rank in self.ranks if not rank.over}
        report.request_stacks({pid: stacks for pid, stacks in late.items() if pid})
        lines = [f"{fault.action} at {fault.point} did not happen within {seconds:.0f} s. {self.orders.dumps()}"]
        for rank in self.ranks:
            lines.append(f"==== rank {rank.number}: {rank.state}")
            for stream in ("out", "err", "stacks"):
                lines.append(report.tail(output_of(self.home, rank.number, stream), 0, report.LOG_LINES))
        return "\n".join(lines)

    # -- starting

    def _start(self) -> None:
        environ = self._environ()
        if self.how == "lightning":
            self._processes.append(self._execute(0, environ | {"MASTER_PORT": str(free_port())}))
        else:
            port = self._port()
            if self.forked:
                for rank in range(self.world):  # all at once, before any is waited for
                    self._nursery(rank, environ | self._place(rank, port))
            for rank in range(self.world):
                start = self._fork if self.forked else self._execute
                self._processes.append(start(rank, environ | self._place(rank, port)))
        self._sessions = [process.pid for process in self._processes]

    def _execute(self, rank: int, environ: dict[str, str]) -> Any:
        with open(output_of(self.home, rank, "out"), "ab") as out, open(output_of(self.home, rank, "err"), "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                cwd=self.home,
                start_new_session=True,
            )

    def _fork(self, rank: int, environ: dict[str, str]) -> Any:
        parent = self._nursery(rank, environ)
        with open(output_of(self.home, rank, "out"), "ab") as out, open(output_of(self.home, rank, "err"), "ab") as err:
            return parent.run(MODULE, environ, str(self.home), out.fileno(), err.fileno())

    def _nursery(self, rank: int, environ: dict[str, str]) -> nursery.Nursery:
        # pools share it, and want stacks of crashes; the script disables that again
        return nursery.shared(rank, environ | {"PYTHONFAULTHANDLER": "1"}, str(REPO), PRELOAD, START_S)

    def _port(self) -> int:
        if self.how == "torchrun":
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            return self._store.port
        return free_port()

    def _environ(self) -> dict[str, str]:
        left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "PYTEST_CURRENT_TEST")
        env = {key: value for key, value in os.environ.items() if key not in left_out}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), env.get("PYTHONPATH")]))
        env[VARIABLE] = self.orders.dumps()
        env["TESTS_SHARED_MEMORY"] = str(self.memory)
        env["OMP_NUM_THREADS"] = "1"
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.home / "inductor")  # code from a cache is not compiled
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        if sys.platform == "linux":  # gloo would look up the host's name, which may not resolve
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.orders.training.cold:
            env["LIGHTNING_ZERO_CACHE"] = str(self.home / "cache")
        return env

    def _place(self, rank: int, port: int) -> dict[str, str]:
        """Return torchrun's variables for a rank."""
        world = str(self.world)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "faults",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.how == "torchrun"),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
