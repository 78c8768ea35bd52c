"""Writer processes from a nursery.

A new one imports torch, which takes longer than all writes of a test. tests/trainer/test_saving_beside_training.py and
test_sigterm.py have the writers of users. No rank forks its own: ranks have threads, and some such forks died
(SIGSEGV), or would have hung at locks of these threads. So a writer has no patches of a test in its rank.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lightning_zero.checkpoint.async_save import writer_process
from tests.ranks import nursery

__all__ = ["forked_writers"]

INSIDE = "TESTS_INSIDE_WRITERS"
DEADLINE_S = 60.0

Inside = Callable[[], AbstractContextManager[object]]


class Forked(nursery.Forked):
    """The part of subprocess.Popen that the rank's side uses."""

    def __init__(
        self, inside: tuple[Inside, ...], command: list[str], stdin: int, stdout: int, env: dict[str, str]
    ) -> None:
        environ = env | {INSIDE: pickle.dumps(inside).hex()}
        orders, ours = os.pipe()
        answers, theirs = os.pipe()
        link = nursery.Connected.to(Path(os.environ[nursery.OWN]), DEADLINE_S)
        child = link.run(__name__, environ, os.getcwd(), theirs, 2, orders)
        super().__init__(link, child.pid)
        os.close(orders)
        os.close(theirs)
        self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(answers, "rb")

    def poll(self) -> int | None:
        if super().poll() is not None:
            self.nursery.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def forked_writers(*inside: Inside) -> Iterator[None]:
    """inside: make contexts in which each writer works"""
    stands_in: Any = SimpleNamespace(Popen=partial(Forked, inside), PIPE=subprocess.PIPE)
    with patch.object(writer_process, "subprocess", stands_in):
        yield


def main() -> None:
    with ExitStack() as stack:
        for make in pickle.loads(bytes.fromhex(os.environ[INSIDE])):
            stack.enter_context(make())
        writer_process.main()
    os._exit(0)
