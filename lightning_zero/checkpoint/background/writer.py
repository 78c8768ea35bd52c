"""The process that writes a rank's files: ``main()`` takes orders from its standard input until that ends.

It imports little, so that it is there soon and takes little memory, and leaves SIGINT and SIGTERM to the rank: what was
begun is written to its end.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from fsspec.config import conf

from lightning_zero.checkpoint.background.snapshot import Kept, Memory
from lightning_zero.checkpoint.sharded.folder import save_folder_at
from lightning_zero.checkpoint.sharded.writing import Blob, RankFiles, write_items
from lightning_zero.checkpoint.unseen import Unseen
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.shared_memory import mapped

__all__ = ["Order", "Wrote", "main", "settings"]

TELL_EVERY_S = 0.5


@dataclass(frozen=True)
class Order:
    """What is to be written.

    Attributes:
        path: of the checkpoint.
        save_id: of the save, which has made the folder.
        rank: whose files they are.
        memory: where the values lie.
        items: the values, and what is no tensor.
        settings: of fsspec's file systems, as far as the rank's program has made them.
    """

    path: str
    save_id: str
    rank: int
    memory: Memory
    items: Sequence[Kept | Blob]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrote:
    """What comes before the reply, now and then: so many bytes more are written."""

    bytes: int


def settings() -> dict[str, Any]:
    """Of fsspec's file systems, as this program has made them, but for what another process may not understand."""

    def is_plain(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    return {protocol: value for protocol, value in conf.items() if is_plain(value)}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no reply
    serve(orders, replies)


def serve(orders: BinaryIO, replies: BinaryIO) -> None:
    """Answers each order with a :class:`~lightning_zero.checkpoint.sharded.writing.RankFiles`, or with words; before
    that, with :class:`Wrote` as long as bytes move."""
    known: tuple[Memory, torch.Tensor] | None = None
    while True:
        try:
            order: Order = pickle.load(orders)
        except EOFError:  # the rank has ended
            return
        try:
            if known is None or known[0] != order.memory:
                known = None
                where = order.memory
                known = where, mapped(where.path, where.identity, max(where.bytes, 1), torch.uint8)
            reply: Any = _write(order, known[1], _Moves(replies))
        except Exception as error:
            reply = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        try:
            pickle.dump(reply, replies)
            replies.flush()
        except BrokenPipeError:
            return


class _Moves:
    """Is told of bytes, by several threads."""

    def __init__(self, replies: BinaryIO) -> None:
        self._replies, self._lock = replies, threading.Lock()
        self._bytes, self._told = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if (now := time.monotonic()) - self._told < TELL_EVERY_S:
                return
            with suppress(BrokenPipeError):  # what was begun is written to its end
                pickle.dump(Wrote(self._bytes), self._replies)
                self._replies.flush()
            self._bytes, self._told = 0, now


def _write(order: Order, memory: torch.Tensor, wrote: _Moves) -> RankFiles:
    conf.update(order.settings)
    folder = save_folder_at(order.path)
    if not folder.sees(order.save_id):
        raise CheckpointError(f"the folder of the save to {order.path} is gone")
    items = [item.piece(memory) if isinstance(item, Kept) else item for item in order.items]
    with Unseen(lambda count: wrote(0)):  # a store may upload when a file is closed, and tells nobody
        return write_items(items, order.rank, folder.create, wrote)
