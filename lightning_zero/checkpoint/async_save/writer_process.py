"""The process that writes a rank's files of async saves, and the rank's handle to it.

:class:`WriterProcess` starts it with the first request. It runs :func:`main`, imports little, and ignores SIGINT and
SIGTERM: a save that has begun is completed. Writing in the rank's own process would hold Python's GIL during training.

Kept although DCP has ``_async_process_executor``, which would save about 150 lines (read in torch 2.13). Its processes
form a process group of their own over another port. It pickles the state dict to them, and the copy of the state dict
is not ordered before the next optimizer step on the device.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from fsspec.config import conf

from lightning_zero.checkpoint.async_save.snapshot import SnapshotChunk, SnapshotMemory
from lightning_zero.checkpoint.rank_tasks import error_text
from lightning_zero.checkpoint.sharded.folder import save_folder_at
from lightning_zero.checkpoint.sharded.planner import PickledItem
from lightning_zero.checkpoint.sharded.writer import RankFiles, write_items
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.shared_memory import map_shared
from lightning_zero.subprocess_main import program_without_lightning

PROGRAM = program_without_lightning("from lightning_zero.checkpoint.async_save.writer_process import main\nmain()")
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class WriteRequest:
    """Files to write."""

    path: str
    save_id: str
    rank: int
    memory: SnapshotMemory
    items: Sequence[SnapshotChunk | PickledItem]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteProgress:
    """Bytes that were written since the last reply."""

    bytes: int


class WriterProcess:
    """A rank's handle to its writer process, which is started again if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, request: WriteRequest, on_write: Callable[[int], None] = lambda count: None) -> RankFiles:
        """Wait until the process has written all files; call ``on_write`` with the bytes now and then."""
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            while isinstance(reply := pickle.load(process.stdout), WriteProgress):  # from our own program
                on_write(reply.bytes)
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
        """Start the process before the first request."""
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
        """Close the pipes, and wait until the process has ended."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._process.wait()
            self._process = None


def fsspec_settings() -> dict[str, Any]:
    """Return this program's fsspec configuration, except for values that are no JSON."""

    def is_json(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    return {protocol: value for protocol, value in conf.items() if is_json(value)}


# -- in the process


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with replies
    serve(requests, replies)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer each request with :class:`WriteProgress`, and then :class:`RankFiles` or an error text."""
    known: tuple[SnapshotMemory, torch.Tensor] | None = None
    while True:
        try:
            request: WriteRequest = pickle.load(requests)
        except EOFError:  # the rank has ended
            return
        try:
            if known is None or known[0] != request.memory:
                known = None
                at = request.memory
                known = at, map_shared(at.path, at.identity, max(at.bytes, 1), torch.uint8)
            reply: Any = _write(request, known[1], _ProgressReplies(replies))
        except Exception as error:
            reply = error_text(error)
        try:
            pickle.dump(reply, replies)
            replies.flush()
        except BrokenPipeError:
            return


class _ProgressReplies:
    """Send the bytes that several threads write."""

    def __init__(self, replies: BinaryIO) -> None:
        self._replies, self._lock = replies, threading.Lock()
        self._bytes, self._sent_at = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if (now := time.monotonic()) - self._sent_at < PROGRESS_INTERVAL_S:
                return
            with suppress(BrokenPipeError):  # a save that has begun is completed
                pickle.dump(WriteProgress(self._bytes), self._replies)
                self._replies.flush()
            self._bytes, self._sent_at = 0, now


def _write(request: WriteRequest, memory: torch.Tensor, on_write: _ProgressReplies) -> RankFiles:
    conf.update(request.settings)
    folder = save_folder_at(request.path)
    if not folder.sees(request.save_id):
        raise CheckpointError(f"the folder of the save to {request.path} is gone")
    items = [item.chunk(memory) if isinstance(item, SnapshotChunk) else item for item in request.items]
    return write_items(items, request.rank, folder.create, on_write)
