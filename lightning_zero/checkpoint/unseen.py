"""What code does that says nothing of how far it is, seen from outside: by the bytes that this process hands on, to
files as the system counts them, and through each of its connections as far as the other side has them. The system's own
count knows nothing of what is sent, which most stores' libraries do."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

__all__ = ["Unseen", "handed_on"]

LOOK_S = 0.5
# Bytes within a look, to files or through one connection: what loggers write and ranks tell each other is less.
LEAST = 32 << 10
FILES = ("wchar", "write_bytes")  # of write(), and of memory that is mapped, or past the page cache
TCP, TCP_INFO = 6, 11  # of Linux
ACKNOWLEDGED, INFO_BYTES = 120, 192  # where that stands in what it gives, and room for all of it


class Unseen:
    """Inside, somebody hears, from a thread, that this process hands bytes on.

    Args:
        goes_on: is told about how many so far.
    """

    def __init__(self, goes_on: Callable[[int], object]) -> None:
        self._goes_on = goes_on
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-unseen", daemon=True)

    def __enter__(self) -> Unseen:
        self._begun = handed_on()
        self._seen = dict(self._begun)  # also of connections that were closed since
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            now = handed_on()
            goes_on = any(count - self._seen.get(name, 0) >= LEAST for name, count in now.items())
            self._seen |= now
            if goes_on:
                self._goes_on(_between(self._begun, self._seen))


def handed_on() -> dict[str, int]:
    """Bytes so far, by what counts them; as far as this system tells."""
    found: dict[str, int] = {}
    with suppress(OSError), open("/proc/self/io") as file:
        counts = dict(line.split(": ") for line in file)
        found |= {name: int(counts[name]) for name in FILES if name in counts}
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                name = os.readlink(f"/proc/self/fd/{number}")  # numbers are used again, and these names are not
                if name.startswith("socket:") and (count := _sent(int(number))) is not None:
                    found[name] = count
    return found


def _sent(number: int) -> int | None:
    """None: through no connection of this kind."""
    info, size = ctypes.create_string_buffer(INFO_BYTES), ctypes.c_uint(INFO_BYTES)
    # As it is: an object around it would close it, or be inherited by a fork.
    failed = _getsockopt()(number, TCP, TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < ACKNOWLEDGED + 8:
        return None
    return ctypes.c_uint64.from_buffer(info, ACKNOWLEDGED).value


def _between(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Most is counted in two ways, the one sooner and the other later, so they are not added up."""
    grown = {name: count - before.get(name, 0) for name, count in now.items()}
    sent = sum(count for name, count in grown.items() if name not in FILES)
    return max(sent, *(grown.get(name, 0) for name in FILES))


@cache
def _getsockopt() -> Any:
    return ctypes.CDLL(None).getsockopt
