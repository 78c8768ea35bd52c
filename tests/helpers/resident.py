"""The largest memory of a process in a context.

Its own, and memory shared with other processes, without the page cache. Another process looks: a thread would not run
while Python's lock is held, such as while whole files are read.
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
# Reports once that it looks, and, when its input ends, the KiB that it has seen: before, at most, and at the end.
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
    """Bytes beyond those at the beginning; set at the end.

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
    """Measure this process, or that one, inside. Peaks of a few milliseconds can be missed."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again unseen
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
