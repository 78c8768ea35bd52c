"""The points of a save: before and after each operation on files, by name.

The events of a save have one order on each rank, and names such as ``"before create __0_0.distcp"`` and ``"after sync
manifest.json"``. :func:`observed` calls a function at each.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_zero.checkpoint import atomic, file_writers, full_checkpoint
from lightning_zero.checkpoint.async_save import saver, snapshot, writer_process
from lightning_zero.checkpoint.sharded import folder

__all__ = ["killed_everywhere", "observed"]

Reach = Callable[[str], None]


@contextmanager
def observed(reach: Reach) -> Iterator[None]:
    """Call ``reach`` with the name of each point before this process continues.

    Of a file's many writes, the first, the second, the fourth and so on are points.
    """

    writes: Counter[str] = Counter()

    def around(what: Callable[..., str], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = what(*args)
            if name.startswith("write"):
                writes[name] += 1
                if writes[name].bit_count() > 1:
                    return original(*args, **kwargs)
            reach(f"before {name}")
            result = original(*args, **kwargs)
            reach(f"after {name}")
            return result

        return call

    def name_of(path: Any) -> str:
        return os.path.basename(os.fspath(path))

    targets: list[tuple[Any, str, Callable[..., str]]] = [
        (folder.LocalFolder, "begin", lambda self, token: "begin"),
        (folder.LocalFolder, "create", lambda self, name: f"create {name}"),
        (folder.LocalFolder, "commit", lambda self, *progress: "commit"),
        (file_writers.ChecksumWriter, "__exit__", lambda self, *error: f"finish {name_of(self._file.name)}"),
        (file_writers.ChecksumWriter, "write", lambda self, data: f"write {name_of(self._file.name)}"),
        (file_writers.ThreadedWriter, "__exit__", lambda self, *error: f"finish {name_of(self._file.name)}"),
        (file_writers.ThreadedWriter, "_put", lambda self, piece: f"write {name_of(self._file.name)}"),
        (atomic, "exchange", lambda one, other: "exchange"),
        (os, "rename", lambda one, other: f"rename to {name_of(other)}"),
        (os, "unlink", lambda path, **at: f"unlink {name_of(path)}"),
    ]
    targets += [
        (snapshot.Snapshot, "take", lambda self, items: "copy"),
        (writer_process.WriterProcess, "write", lambda self, order, wrote: f"order of rank {order.rank}"),
        (saver.SaveOutcome, "_part", lambda self: "parting"),
    ]
    targets += [
        (module, "remove", lambda path: f"remove {name_of(path)}") for module in (atomic, folder, full_checkpoint)
    ]
    targets += [(module, "sync_folder", lambda path: f"sync {name_of(path)}") for module in (atomic, folder)]
    targets += [(module, "make_folders", lambda path: "make folders") for module in (folder, full_checkpoint)]
    with ExitStack() as stack:
        for owner, name, what in targets:
            stack.enter_context(patch.object(owner, name, around(what, getattr(owner, name))))
        stack.enter_context(patch.object(os, "fsync", around(lambda number: f"fsync {_target(number)}", os.fsync)))
        yield


def _target(number: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{number}"))


def killed_everywhere(home: Path, save: Callable[[], Any]) -> dict[str, Path]:
    """Return copies of ``home`` as after a SIGKILL of all ranks at each point.

    Written data stays in the system's memory.
    """
    copies: dict[str, Path] = {}
    lock, inside = threading.RLock(), threading.local()

    def reach(point: str) -> None:
        if getattr(inside, "now", False):
            return
        with lock:
            inside.now = True
            name = f"{len(copies):03} {point}"
            copies[name] = home.with_name(f"{home.name} {name}")
            shutil.copytree(home, copies[name], symlinks=True)
            inside.now = False

    with observed(reach):
        save()
    return copies
