"""A process that has imported everything once, and forks a rank whenever one is asked for.

There is one for each rank number: what a set of strings yields first depends on a seed that a fork inherits, and ranks
that agree only thanks to a common seed must be found out.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks import worker

ROOM = 1 << 20  # bytes; an environment fits
COLD = "TESTS_NURSERY_COLD"  # set where nothing may be compiled before a fork


class Forked:
    """The part of subprocess.Popen that pools use, for a child of the nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self.nursery.ask("poll", self.pid)
            except OSError:  # nobody is left to reap it but the kernel, which kills it with its parent
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.002)
        return code


class Nursery:
    """pytest's side: starts the process at once, and waits for it with the first rank that it asks for."""

    def __init__(self, environ: dict[str, str], cwd: str, preload: tuple[str, ...], deadline: float) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(deadline)
        self._asking = threading.Lock()
        command = [sys.executable, "-m", "tests.ranks.nursery", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                [*command, ",".join(preload)],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)

    def ask(self, *question: Any, fds: tuple[int, ...] = ()) -> Any:
        try:
            with self._asking:
                socket.send_fds(self.link, [pickle.dumps(question)], fds)
                if answer := self.link.recv(ROOM):
                    return pickle.loads(answer)
                raise ConnectionError("the nursery is gone")
        except BaseException as error:  # the next answer might be this question's
            if not self.log.closed:
                error.add_note(self.output())
                self.close()
            raise

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def fork(self, arguments: list[str], environ: dict[str, str], cwd: str, link: int, log: int) -> Forked:
        return Forked(self, self.ask("fork", arguments, environ, cwd, fds=(link, log)))

    def run(self, module: str, environ: dict[str, str], cwd: str, out: int, err: int) -> Forked:
        """``module.main()`` in a process of its own that ends as ``python -m module`` does."""
        return Forked(self, self.ask("run", module, environ, cwd, fds=(out, err)))

    def close(self) -> None:
        atexit.unregister(self.close)
        self.process.kill()
        self.process.wait()
        self.link.close()
        self.log.close()


_nurseries: dict[tuple[int, tuple[str, ...]], Nursery] = {}
_making = threading.Lock()


def shared(rank: int, environ: dict[str, str], cwd: str, preload: tuple[str, ...], deadline: float) -> Nursery:
    """The one that all pools of this process share."""
    with _making:
        found = _nurseries.get((rank, preload))
        if found is None or found.process.poll() is not None:
            found = _nurseries[rank, preload] = Nursery(environ, cwd, preload, deadline)
        return found


def children_can_run_backward() -> bool:
    """Torch before 2.13 forbids backward in a fork of a process that has compiled something."""
    import torch

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    try:
        torch.ones(1, requires_grad=True).sum().backward()
        os._exit(0)
    except RuntimeError:
        os._exit(1)


def warm_up() -> None:
    """What the first compilation imports and sets up takes longer than most tests."""
    import torch
    import torch._inductor.compile_fx
    import tqdm
    from torch._dynamo.utils import counters

    # it would start a thread, and threads do not survive a fork
    patience, tqdm.tqdm.monitor_interval = tqdm.tqdm.monitor_interval, 0
    x, weight = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    torch.compile(lambda: torch.tanh(x @ weight).sum(), backend="aot_eager")().backward()
    torch._dynamo.reset()
    counters.clear()
    tqdm.tqdm.monitor_interval = patience


def divide(listener: socket.socket, fds: list[int], environ: dict[str, str], cwd: str, out: int, err: int) -> int:
    """Forks; 0 in the child, which has a session, a folder, an environment and outputs of its own."""
    ready, in_session = os.pipe()
    pid = os.fork()
    if pid:
        for fd in (*fds, in_session):
            os.close(fd)
        os.read(ready, 1)  # nothing, but only once a signal to the rank's process group finds it
        os.close(ready)
        return pid
    os.setsid()
    os.close(ready)
    os.close(in_session)
    listener.close()
    for fd, to in ((out, 1), (err, 2)):
        os.dup2(fd, to)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    return 0


def fork(listener: socket.socket, fds: list[int], arguments: list[str], environ: dict[str, str], cwd: str) -> int:
    link, log = fds
    parent = os.getpid()
    pid = divide(listener, fds, environ, cwd, log, log)
    if pid:
        return pid
    try:
        os.close(log)
        stacks, backend, timeout = arguments
        worker.begin(parent, stacks)
        worker.Worker(Connection(link), backend, float(timeout)).serve()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    fd, parent, preload = sys.argv[1:]
    worker.die_with(int(parent))
    worker.import_all(preload)
    if "lightning_zero" in preload.split(",") and COLD not in os.environ:
        warm_up()
        if not children_can_run_backward():
            os.set_inheritable(int(fd), True)
            os.execve(
                sys.executable, [sys.executable, "-m", "tests.ranks.nursery", *sys.argv[1:]], os.environ | {COLD: "1"}
            )
    if threading.active_count() > 1:
        raise RuntimeError(f"a fork would lose some of {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # or each rank's first collection would copy all pages
    listener = socket.socket(fileno=int(fd))
    while True:
        question, fds, _, _ = socket.recv_fds(listener, ROOM, 2)
        if not question:
            return
        what, *body = pickle.loads(question)
        if what == "fork":
            answer: int | None = fork(listener, fds, *body)
        elif what == "run":
            module, environ, cwd = body
            parent = os.getpid()
            answer = divide(listener, fds, environ, cwd, *fds)
            if not answer:  # ends as any script does, after whatever it raises
                worker.die_with(parent)
                for fd in fds:
                    os.close(fd)
                importlib.import_module(module).main()
                return
        else:
            pid, status = os.waitpid(body[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        listener.send(pickle.dumps(answer))


if __name__ == "__main__":
    main()
