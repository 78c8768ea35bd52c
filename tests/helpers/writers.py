"""Writer processes that are forks of their ranks: one that is started anew imports torch, which takes longer than all
that a test has it write. Those of tests/trainer/test_saving_beside_training.py and test_sigterm.py are as users have them."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lightning_zero.checkpoint.background import process, writer

__all__ = ["forked_writers"]

HIGHEST_FD = 4096


class Forked:
    """The part of subprocess.Popen that the rank's side uses."""

    def __init__(self, command: list[str], stdin: int, stdout: int, env: dict[str, str]) -> None:
        orders, ours = os.pipe()
        answers, theirs = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(orders)
            os.close(theirs)
            self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(answers, "rb")
            return
        try:
            os.dup2(orders, 0)
            os.dup2(theirs, 1)
            os.closerange(3, HIGHEST_FD)  # a rank's sockets must close when it dies
            sys.stdin = os.fdopen(0)
            faulthandler.enable(
                2
            )  # a crash says where: forks of ranks with threads may die of what others need not fear
            writer.main()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@contextmanager
def forked_writers() -> Iterator[None]:
    stands_in: Any = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
    with patch.object(process, "subprocess", stands_in):
        yield
