"""Facts about one rank, seen from outside: its process, its events, and its output since the fault."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.injector import events_of, output_of
from tests.ranks import processes, report

__all__ = ["Rank", "fired"]

LOOK_S = 0.5  # counted of the time between two looks: this process may have been stopped itself


class Rank:
    """
    Attributes:
        pid: 0 before it has started.
        over: True after it has ended.
        code: as subprocess's; None: it lives, or its end is unknown.
        seconds: from the fault to its end; None: it did not end in time.
        printed: its output to stdout and stderr since the fault.
        at: seconds from the fault at which a text was first seen, for the texts that :meth:`watch_for` was given.
        slept: those of them in which the rank slept, and was not stopped nor in need of a core or the disk.
    """

    def __init__(self, home: Path, number: int) -> None:
        self.home, self.number = home, number
        self.pid = 0
        self.over = False
        self.code: int | None = None
        self.seconds: float | None = None
        self.events: list[dict[str, Any]] = []
        self.printed: dict[str, str] = {"out": "", "err": ""}
        self.stacks = ""
        self.watched: dict[str, Any] = {}
        self.at: dict[str, float] = {}
        self.slept: dict[str, float] = {}
        self._slept, self._looked_at = 0.0, time.monotonic()
        self._read = 0
        self._ended_at: float | None = None
        self._sizes = (-1, -1)
        self.offsets: dict[str, int] | None = None

    def watch_for(self, name: str, pattern: Any) -> None:
        """Set ``at[name]`` and ``slept[name]`` when the compiled ``pattern`` is first found in the rank's output."""
        self.watched[name] = pattern

    def look(self, process: Any, fired_at: float | None) -> None:
        """``process``: the rank's, where it is a child of ours."""
        self._read_events()
        before, self._looked_at = self._looked_at, time.monotonic()
        if fired_at is not None and processes.asleep(self.pid):
            self._slept += min(self._looked_at - before, LOOK_S)
        if not self.over:
            self._look_at_process(process)
            if self.over:
                self._ended_at = time.monotonic()
        if fired_at is not None and len(self.at) < len(self.watched):
            self.read_output()
            for name, pattern in self.watched.items():
                if name not in self.at and pattern.search(self.text):
                    self.at[name] = time.monotonic() - fired_at
                    self.slept[name] = self._slept

    def finish(self, fired_at: float) -> None:
        self._read_events()
        self.read_output()
        self.stacks = report.tail(output_of(self.home, self.number, "stacks"), 0, report.STACK_LINES)
        if self._ended_at is not None:
            self.seconds = max(self._ended_at - fired_at, 0.0)

    @property
    def text(self) -> str:
        return self.printed["out"] + self.printed["err"]

    @property
    def state(self) -> str:
        if not self.over:
            return "lives" if self.pid else "has not started"
        return "is gone" if self.code is None else report.exit_words(self.code)

    def has(self, what: str) -> bool:
        return any(event["what"] == what for event in self.events)

    def read_output(self) -> None:
        for stream in ("out", "err"):
            offset = (self.offsets or {}).get(f"{self.number}.{stream}", 0)
            path = output_of(self.home, self.number, stream)
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(offset)
                    self.printed[stream] = file.read().decode(errors="replace")

    def _look_at_process(self, process: Any) -> None:
        if process is not None:
            self.pid = process.pid
            self.code = process.poll()
            self.over = self.code is not None
            return
        if not self.pid and self.events:
            self.pid = self.events[0]["pid"]
        if self.pid:
            self.code = processes.exit_code(self.pid)
            self.over = processes.ended(self.pid)

    def _read_events(self) -> None:
        path = events_of(self.home, self.number)
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        self.events.append(json.loads(line))


def fired(ranks: Sequence[Rank]) -> float | None:
    """The first time of the fault. Then all ranks know the beginning of output that counts."""
    events = [event for rank in ranks for event in rank.events if event["what"] == "fired"]
    if not events:
        return None
    first = min(events, key=lambda event: event["at"])
    for rank in ranks:
        rank.offsets = first["written"]
    return first["at"]
