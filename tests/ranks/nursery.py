"""A process that has imported everything once, and forks a rank on request.

There is one for each rank number. The first string of a set depends on a seed that a fork inherits, and ranks that
agree only thanks to a common seed must be found out. Where several processes run tests, the process that starts them
serves nurseries for all of them. Each process has a connection of its own, with which its ranks end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.ranks import worker

ROOM = 1 << 20  # bytes; an environment fits
COLD = "TESTS_NURSERY_COLD"  # set where nothing may be compiled before a fork
CHILD = object()
SERVED = "TESTS_NURSERIES"  # folder of those that are served, whose sockets have the numbers of their ranks
OWN = "TESTS_NURSERY"  # socket of the nursery that started a rank


class Forked:
    """The part of subprocess.Popen that pools use, for a child of the nursery."""

    def __init__(self, nursery: Connected, pid: int) -> None:
        self.nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self.nursery.ask("poll", self.pid)
            except OSError:  # only the kernel can wait for it, which kills it with its parent
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.002)
        return code


class Connected:
    """One side of a nursery of another process, or of this one; ``path``: of its socket."""

    def __init__(self, path: Path, link: socket.socket, log: Any, deadline: float) -> None:
        self.path, self.link, self.log = path, link, log
        self.link.settimeout(deadline)
        self._asking = threading.Lock()

    @classmethod
    def to(cls, path: Path, deadline: float) -> Connected:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(str(path))
        return cls(path, link, open(path.with_suffix(".log"), "rb"), deadline)  # noqa: SIM115 - as long as the connection

    @property
    def usable(self) -> bool:
        return not self.log.closed

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
        return Forked(self, self.ask("fork", arguments, environ | {OWN: str(self.path)}, cwd, fds=(link, log)))

    def run(self, module: str, environ: dict[str, str], cwd: str, out: int, err: int, *stdin: int) -> Forked:
        """``module.main()`` in a process of its own that ends as ``python -m module`` does."""
        return Forked(self, self.ask("run", module, environ, cwd, fds=(out, err, *stdin)))

    def close(self) -> None:
        """Ends the ranks that were forked through this connection."""
        self.link.close()
        self.log.close()


class Nursery(Connected):
    """Starts the process at once, and waits for it with the first rank that it asks for.

    path: of a socket by which other processes reach it, too
    """

    def __init__(
        self, environ: dict[str, str], cwd: str, preload: tuple[str, ...], deadline: float, path: Path
    ) -> None:
        log = open(path.with_suffix(".log"), "w+b")  # noqa: SIM115 - as long as the process
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(path, link, log, deadline)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(str(path))
        door.listen()
        command = [sys.executable, "-m", "tests.ranks.nursery", str(theirs.fileno()), str(door.fileno())]
        with theirs, door:
            # The kernel ends the nursery with the thread that started it, so that is one of the process's.
            self.process = _starter.submit(
                subprocess.Popen,
                [*command, str(os.getpid()), ",".join(preload)],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd,
                pass_fds=(theirs.fileno(), door.fileno()),
                start_new_session=True,
            ).result()
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        atexit.unregister(self.close)
        self.process.kill()
        self.process.wait()
        super().close()


_starter = ThreadPoolExecutor(1)
_nurseries: dict[tuple[int, tuple[str, ...]], Connected] = {}
_making = threading.Lock()


def serve(environs: dict[int, dict[str, str]], cwd: str, preload: tuple[str, ...], deadline: float) -> None:
    """Starts nurseries of these ranks for the processes that this one starts, until it ends."""
    folder = _folder()
    for rank, environ in environs.items():
        _nurseries[rank, preload] = Nursery(environ, cwd, preload, deadline, folder / _name(rank, preload))
    os.environ[SERVED] = str(folder)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nurseries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _name(rank: int, preload: tuple[str, ...]) -> str:
    return f"{rank}-{'-'.join(preload)}.socket"


def _made(rank: int, environ: dict[str, str], cwd: str, preload: tuple[str, ...], deadline: float) -> Connected:
    path = Path(os.environ.get(SERVED, "nowhere"), _name(rank, preload))
    if path.exists():
        with suppress(ConnectionError):  # it is gone
            return Connected.to(path, deadline)
    return Nursery(environ, cwd, preload, deadline, _folder() / _name(rank, preload))


def shared(rank: int, environ: dict[str, str], cwd: str, preload: tuple[str, ...], deadline: float) -> Connected:
    """The one that all pools of this process share."""
    with _making:
        found = _nurseries.get((rank, preload))
        if found is None or not found.usable:
            found = _nurseries[rank, preload] = _made(rank, environ, cwd, preload, deadline)
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
    """The imports and the setup of the first compilation take longer than most tests."""
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


def divide(own: list[socket.socket], fds: list[int], environ: dict[str, str], cwd: str, streams: dict[int, int]) -> int:
    """Forks; 0 in the child, which has a session, a folder and an environment of its own, and ``streams``, by number."""
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
    for link in own:
        link.close()
    for to, fd in streams.items():
        os.dup2(fd, to)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    return 0


def fork(own: list[socket.socket], fds: list[int], arguments: list[str], environ: dict[str, str], cwd: str) -> int:
    link, log = fds
    parent = os.getpid()
    pid = divide(own, fds, environ, cwd, {1: log, 2: log})
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
    fd, door, parent, preload = sys.argv[1:]
    worker.die_with(int(parent))
    worker.import_all(preload)
    if "lightning_zero" in preload.split(",") and COLD not in os.environ:
        warm_up()
        if not children_can_run_backward():
            for inherited in (fd, door):
                os.set_inheritable(int(inherited), True)
            os.execve(
                sys.executable, [sys.executable, "-m", "tests.ranks.nursery", *sys.argv[1:]], os.environ | {COLD: "1"}
            )
    if threading.active_count() > 1:
        raise RuntimeError(f"a fork would lose some of {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # or each rank's first collection would copy all pages
    answer_all(socket.socket(fileno=int(fd)), socket.socket(fileno=int(door)))


def answer_all(first: socket.socket, door: socket.socket) -> None:
    """Answer until ``first`` is closed; children that were forked over another connection end with that."""
    children: dict[socket.socket, set[int]] = {first: set()}
    with selectors.DefaultSelector() as waiting:
        waiting.register(first, selectors.EVENT_READ)
        waiting.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                link: Any = key.fileobj
                if link is door:
                    link, _ = door.accept()
                    children[link] = set()
                    waiting.register(link, selectors.EVENT_READ)
                    continue
                question, fds = b"", []
                with suppress(ConnectionError):  # it is closed
                    question, fds, _, _ = socket.recv_fds(link, ROOM, 3)
                if question:
                    answer = answer_to(pickle.loads(question), fds, [*children, door], children[link])
                    if answer is CHILD:
                        return
                    with suppress(OSError):
                        link.send(pickle.dumps(answer))
                elif link is first:
                    return
                else:
                    waiting.unregister(link)
                    for pid in children.pop(link):
                        with suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    link.close()


def answer_to(question: tuple[Any, ...], fds: list[int], own: list[socket.socket], children: set[int]) -> Any:
    """Return the answer; CHILD if a child has returned, which ends as any script does, after any error."""
    what, *body = question
    if what == "fork":
        pid = fork(own, fds, *body)
    elif what == "run":
        module, environ, cwd = body
        parent = os.getpid()
        pid = divide(own, fds, environ, cwd, dict(zip((1, 2, 0), fds, strict=False)))  # who reads nothing gives no 0
        if not pid:
            worker.die_with(parent)
            for fd in fds:
                os.close(fd)
            importlib.import_module(module).main()
            return CHILD
    else:
        pid, status = os.waitpid(body[0], os.WNOHANG)
        children.discard(pid)
        return os.waitstatus_to_exitcode(status) if pid else None
    children.add(pid)
    return pid


if __name__ == "__main__":
    main()
