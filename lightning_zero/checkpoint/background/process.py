"""A rank's hold on its writer process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from lightning_zero.alone import program_without_lightning
from lightning_zero.checkpoint.background.writer import Order, Wrote
from lightning_zero.checkpoint.sharded.writing import RankFiles
from lightning_zero.errors import CheckpointError

__all__ = ["WriterProcess"]

PROGRAM = program_without_lightning("from lightning_zero.checkpoint.background.writer import main\nmain()")


class WriterProcess:
    """Started with the first order, and again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, order: Order, wrote: Callable[[int], None] = lambda count: None) -> RankFiles:
        """Waits until it has written what is ordered; ``wrote`` is told, now and then, how many bytes more are.

        Raises:
            CheckpointError: it could not, or died.
        """
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(order, process.stdin)
            while isinstance(reply := pickle.load(process.stdout), Wrote):  # from our own program
                wrote(reply.bytes)
        except (OSError, EOFError) as error:
            process.kill()
            process.wait()
            raise CheckpointError(
                f"the process that writes checkpoints has ended with status {process.returncode}; where the host runs "
                "out of memory, its system ends processes"
            ) from error
        if isinstance(reply, RankFiles):
            return reply
        raise CheckpointError(str(reply))

    def start(self) -> None:
        """Ahead of the first order, which would wait for it."""
        self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def close(self) -> None:
        """Lets it end by itself."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._process.wait()
            self._process = None


def _send(order: Order, pipe: IO[bytes]) -> None:
    pickle.dump(order, pipe)
    pipe.flush()
