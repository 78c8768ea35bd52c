"""Pools of persistent ranks: importing torch and Lightning costs seconds, so ranks are kept."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.ranks import nursery, processes, report, shared_gpu
from tests.ranks.report import RankDeadline, RankFailure

__all__ = ["RankDeadline", "RankFailure", "RankPool", "Ranks", "serve_nurseries"]

REPO = Path(__file__).resolve().parents[2]
# Bytes of a block that glibc returns to the system as soon as it is freed. Without a fixed number it takes larger and
# larger ones from its heap, the more of them a rank has freed, and tests that measure memory depend on their order.
LARGE = 4 << 20
PRELOAD = ("torch", "lightning.pytorch", "lightning_zero")

Words = dict[int, tuple[str, Any]]  # rank -> (kind, body)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes] | nursery.Forked
    link: Connection
    log: Path
    stacks: Path
    log_start: int = 0
    stacks_start: int = 0

    def mark(self) -> None:
        """Later reports show only later output."""
        self.log_start, self.stacks_start = report.size(self.log), report.size(self.stacks)

    def kill(self) -> None:
        # the group first: once the leader is reaped, nothing protects its id from reuse
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.link.close()


class RankPool:
    """`world_size` processes in one process group, started at first use and after every kill.

    deadline: seconds a call may take unless it says otherwise
    preload: modules each rank imports before its first call
    start_deadline: seconds the ranks may take to start
    grace: seconds the other ranks get to answer once one has failed, or to settle after a call; those in which one is
        stopped, or waits for a core or the disk, do not count
    collective_timeout: the process group's; long, so that the deadline speaks first
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        deadline: float = 60.0,
        *,
        preload: tuple[str, ...] = PRELOAD,
        start_deadline: float = 180.0,
        grace: float = 3.0,
        settle_deadline: float = 20.0,
        collective_timeout: float = 600.0,
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self.deadline = deadline
        self.preload = preload
        self.start_deadline = start_deadline
        self.grace = grace
        self.settle_deadline = settle_deadline
        self.collective_timeout = collective_timeout
        self.starts = 0
        self._ranks: list[_Rank] = []
        self._stores: list[Any] = []
        self._home: Path | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The running ranks, in order; empty before the first call and after a kill."""
        return [rank.process.pid for rank in self._ranks]

    def run(
        self, fn: Callable[..., Any], /, *args: Any, deadline: float | None = None, last: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; the return values in rank order.

        All ranks share a fresh working directory, which is gone after the call. `last`: they are killed after it, as it
        leaves them communicators that no rank can use or leave.
        """
        __tracebackhide__ = True
        from tests.ranks import wire

        ref = wire.reference(fn)
        arguments = wire.dumps((args, kwargs))
        name = ":".join(ref)
        try:
            self._start()
            assert self._home is not None
            cwd = tempfile.mkdtemp(prefix="call-", dir=self._home)
            seconds = self.deadline if deadline is None else deadline
            words = self._ask(("call", ref, arguments, cwd, self._host_store()), seconds)
            bad = [rank for rank, word in words.items() if word[0] != "returned"]
            missing = self.world_size - len(words)
            if bad:
                # ranks that all answered may be in step still; then the pool is worth keeping
                usable = not missing and self._settled(self._ask(("settle",), self.grace))
                text = self._report(f"{name} failed first on rank {bad[0]}", words)
                if not usable:
                    self.kill()
                raise RankFailure(text)
            if missing:
                text = self._report(f"{name} took longer than {seconds:g} s", words)
                self.kill()
                raise RankDeadline(text)
            if last:
                self.kill()
            elif not self._settled(met := self._ask(("settle",), self.settle_deadline)):
                head = f"{name} returned, but the barrier after it failed: unmatched collectives?"
                text = self._report(head, met)
                self.kill()
                raise RankFailure(text)
            shutil.rmtree(cwd, ignore_errors=True)
            self._signal(signal.SIGSTOP)
            return [wire.loads(words[rank][1]) for rank in range(self.world_size)]
        except RankFailure:
            raise
        except BaseException:  # Ctrl-C above all: the ranks are somewhere in the call
            self.kill()
            raise

    def _signal(self, number: signal.Signals) -> None:
        """Stop ranks between calls: gloo's threads wake up a hundred times a second in each.

        In all pools together that was a twelfth of the time of all tests.
        """
        if self._forks:
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)

    def kill(self) -> None:
        """Kill the ranks and their child processes; the next call starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        self._stores.clear()

    def close(self) -> None:
        self.kill()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def _start(self) -> None:
        if self._ranks:
            self._signal(signal.SIGCONT)
            if all(rank.process.poll() is None for rank in self._ranks):
                return
            self.kill()
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix=f"ranks-{self.backend.replace(':', '-')}-"))
        self.starts += 1
        port = self._host_store()
        if self._forks:
            for rank in range(self.world_size):  # all at once, before any is waited for
                self._nursery(rank, self._environ(rank, port))
        for rank in range(self.world_size):
            self._ranks.append(self._spawn(rank, port))
        words = self._await(self.start_deadline)
        if any(word[0] != "ready" for word in words.values()) or len(words) < self.world_size:
            text = self._report("the ranks did not start", words)
            self.kill()
            raise RankFailure(text)

    def _host_store(self) -> int:
        """Serve a store, as torchrun's agent does: no other program can take its port first."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # the pool's own, and the current call's: one that makes a process group itself needs
        # a store without the keys of an earlier group
        self._stores = [*self._stores[:1], store]
        return store.port

    def _spawn(self, rank: int, port: int) -> _Rank:
        assert self._home is not None
        ours, theirs = Pipe()
        log = self._home / f"start{self.starts}-rank{rank}.log"
        stacks = self._home / f"start{self.starts}-rank{rank}.stacks"
        arguments = [str(stacks), self.backend, str(self.collective_timeout)]
        environ = self._environ(rank, port)
        with open(log, "wb") as out, theirs:
            process: subprocess.Popen[bytes] | nursery.Forked
            if self._forks:
                process = self._nursery(rank, environ).fork(
                    arguments, environ, str(self._home), theirs.fileno(), out.fileno()
                )
            else:
                command = [sys.executable, "-m", "tests.ranks.worker", str(theirs.fileno()), str(os.getpid())]
                process = subprocess.Popen(
                    [*command, *arguments, ",".join(self.preload)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    cwd=self._home,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # one process group per rank, killed as a whole
                )
        return _Rank(process, ours, log, stacks)

    @property
    def _forks(self) -> bool:
        # a process that has used CUDA cannot be forked, and importing may use it
        return sys.platform == "linux" and "nccl" not in self.backend

    def _nursery(self, rank: int, environ: dict[str, str]) -> nursery.Nursery:
        return nursery.shared(rank, environ, str(REPO), self.preload, self.start_deadline)

    def _environ(self, rank: int, port: int) -> dict[str, str]:
        world = str(self.world_size)
        env = dict(os.environ)
        env.pop("PYTEST_CURRENT_TEST", None)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), env.get("PYTHONPATH")]))
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            ROLE_RANK=str(rank),
            WORLD_SIZE=world,
            LOCAL_WORLD_SIZE=world,
            ROLE_WORLD_SIZE=world,
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
            NODE_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="tests",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
            OMP_NUM_THREADS="1",
            PYTHONUNBUFFERED="1",
            MALLOC_MMAP_THRESHOLD_=str(LARGE),
            PYTHONFAULTHANDLER="1",
        )
        if "nccl" in self.backend and shared_gpu.shares_gpu():
            env.update(shared_gpu.environ(rank, self.world_size))
        if sys.platform == "linux":  # gloo would look up the host's name, which may not resolve
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "nccl" not in self.backend:  # a compile-worker pool per rank only crowds the cores
            env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        return env

    def _ask(self, order: tuple[Any, ...], seconds: float) -> Words:
        for rank in self._ranks:
            if order[0] == "call":
                rank.mark()
            with contextlib.suppress(OSError):  # it is dead, which _await reports
                rank.link.send(order)
        return self._await(seconds, short=order[0] == "settle")

    def _await(self, seconds: float, short: bool = False) -> Words:
        """Each rank's next word, in order of arrival; silent ranks are missing from it. ``short``: see ``grace``."""
        words: Words = {}
        left, most = seconds, max(seconds, self.deadline) if short else seconds
        graced = False
        while len(words) < self.world_size and left > 0:
            begun = time.monotonic()
            silent = {rank.link: i for i, rank in enumerate(self._ranks) if i not in words}
            ready = wait(list(silent), timeout=min(left, 0.5))
            for link, i in silent.items():
                if link in ready:
                    try:
                        words[i] = link.recv()
                    except (EOFError, OSError):
                        words[i] = ("died", None)
                elif self._ranks[i].process.poll() is not None and not link.poll():
                    # no end of file: a child that it forked still holds the pipe open
                    words[i] = ("died", None)
            passed = min(time.monotonic() - begun, 1.0)  # this process may have been stopped itself
            most -= passed
            pids = [self._ranks[i].process.pid for i in silent.values() if i not in words]
            if not (graced or short) or all(map(processes.asleep, pids)):
                left -= passed
            left = min(left, most)
            if not graced and any(kind in ("raised", "died") for kind, _ in words.values()):
                graced = True
                left = min(left, self.grace)
        return words

    def _settled(self, words: Words) -> bool:
        kinds = [kind for kind, _ in words.values()]
        return kinds == ["settled"] * self.world_size

    def _report(self, head: str, words: Words) -> str:
        """Call before killing: silent ranks are asked for their stacks."""
        silent = [rank for i, rank in enumerate(self._ranks) if i not in words]
        report.request_stacks({rank.process.pid: rank.stacks for rank in silent})
        lines = [f"{head} ({self.world_size} ranks, {self.backend})"]
        for i, rank in enumerate(self._ranks):
            kind, body = words.get(i, ("gave no answer", None))
            if kind == "died":
                try:
                    code = rank.process.wait(timeout=10)
                    kind = report.exit_words(code)
                except subprocess.TimeoutExpired:
                    kind = "closed its pipe"
            lines.append(f"==== rank {i} {kind}")
            if kind == "raised":
                lines.append(body.rstrip())
            for title, text in (
                ("stacks", report.tail(rank.stacks, rank.stacks_start, report.STACK_LINES)),
                ("output", report.tail(rank.log, rank.log_start, report.LOG_LINES)),
            ):
                if text:
                    lines += [f"-- rank {i} {title}", text]
        return "\n".join(lines)


def serve_nurseries(world_size: int) -> None:
    """For the pools of all processes that this one starts."""
    pool = RankPool(world_size)
    environs = {rank: pool._environ(rank, 0) for rank in range(world_size)}
    nursery.serve(environs, str(REPO), pool.preload, pool.start_deadline)


class Ranks:
    """The session's pools, one per backend and world size."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], RankPool] = {}

    def pool(self, world_size: int, backend: str = "gloo") -> RankPool:
        key = (backend, world_size)
        if key not in self._pools:
            self._pools[key] = RankPool(world_size, backend)
        return self._pools[key]

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        /,
        *args: Any,
        backend: str = "gloo",
        deadline: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        __tracebackhide__ = True
        return self.pool(world_size, backend).run(fn, *args, deadline=deadline, **kwargs)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
