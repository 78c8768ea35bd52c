"""The most memory that a process holds while something goes on: its own, and what it shares with other processes, page
cache apart, which the system takes back when it wants to.

Another process looks: a thread of the same one would not get to look while Python's lock is held, which is when whole
files are read into memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

__all__ = ["MIB", "Held", "holding"]

MIB = 1 << 20
NAMES = ("RssAnon", "RssShmem")
# Tells once that it looks, and, when its input ends, the most that it has seen, in KiB: before, at most, and at the end.
LOOK = """
import os, select, sys
status = os.open(f"/proc/{sys.argv[1]}/status", os.O_RDONLY)
names = tuple(name.encode() for name in sys.argv[2].split(","))
def held():
    lines = os.pread(status, 1 << 16, 0).splitlines()
    return [next(int(line.split()[1]) for line in lines if line.startswith(name)) for name in names]
first = most = held()
print("looks", flush=True)
while not select.select([0], [], [], 0.003)[0]:
    most = [*map(max, most, held())]
now = held()
print(*first, *map(max, most, now), *now, flush=True)
"""


@dataclass
class Held:
    """In bytes, beyond what was held at the beginning; filled in at the end.

    Attributes:
        own: private memory, at most.
        shared: with other processes, at most.
        kept: of both, at the end.
    """

    own: int = 0
    shared: int = 0
    kept: int = 0

    @property
    def most(self) -> int:
        return self.own + self.shared

    def __repr__(self) -> str:
        return f"{self.own / MIB:.0f} + {self.shared / MIB:.0f} shared, {self.kept / MIB:.0f} kept (MiB)"


@contextmanager
def holding(pid: int | None = None) -> Iterator[Held]:
    """What this process, or that one, holds inside. Skips nothing that lasts longer than a few milliseconds."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free would be taken, and nobody would see it
    look = [sys.executable, "-S", "-E", "-c", LOOK, str(pid or os.getpid()), ",".join(NAMES)]
    out = Held()
    with subprocess.Popen(look, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "looks\n"
        try:
            yield out
        finally:
            process.stdin.close()
            numbers = [int(word) << 10 for word in process.stdout.readline().split()]
    own, shared, most_own, most_shared, end_own, end_shared = numbers
    out.own, out.shared, out.kept = most_own - own, most_shared - shared, end_own + end_shared - own - shared
