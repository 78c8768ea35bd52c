"""What /proc tells of processes of this host: who they are, whether they are gone, and which compilers this one has
started."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_zero.mesh import boot_id, host_name
from lightning_zero.native.build import MARK
from lightning_zero.native.commands import children, end, process_stat

__all__ = ["kill_compilers", "has_ended", "own_process"]

ROUND_S = 0.02
ROUNDS = 50  # at most: who ends does not wait


def own_process() -> dict[str, Any]:
    """What others need to find this process: host, namespace, number, and when it was started, in ticks since boot.
    Empty where /proc does not show it under its own number."""
    pid, unknown = os.getpid(), {"host": "", "pid": os.getpid(), "started": "0"}
    with suppress(OSError):
        stat = process_stat(pid)
        if stat is None or os.readlink("/proc/self") != str(pid) or not boot_id():
            return unknown
        return {
            "host": f"{host_name()} {os.readlink('/proc/self/ns/pid')}",
            "pid": pid,
            "started": stat[19],
        }
    return unknown


def has_ended(process: dict[str, Any]) -> bool:
    """Whether it ran on this host, as :func:`own_process` said there, and does so no more."""
    if not process["host"] or process["host"] != own_process()["host"]:
        return False
    stat = process_stat(process["pid"])
    return stat is None or stat[0] in "ZX" or stat[19] != process["started"]


def kill_compilers() -> None:
    """Kills the compilers of the C++ executor that this process has started, and what they have started. For a process
    that ends right behind it, and starts no others any more: a thread that builds would start the next compiler, or the
    one that was killed once more, and leave it behind."""
    subprocess.Popen = _refuse  # type: ignore[assignment,misc]
    quiet = 0
    for _ in range(ROUNDS):
        found = [child for child in children().get(os.getpid(), []) if _is_compiler(child)]
        end(found)
        quiet = 0 if found else quiet + 1
        if quiet == 2:
            return
        time.sleep(ROUND_S)  # a process that has just been started is not a compiler yet


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError("this process ends")


def _is_compiler(pid: int) -> bool:
    with suppress(OSError):
        return MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
