"""Inside a rank: count batches, record events, and start the fault at its place and time."""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.actions import ACTIONS, Skip
from tests.faults.spec import Fault, Orders

__all__ = ["Injector", "events_of", "find", "output_of", "wrap"]


def events_of(home: Path, rank: int) -> Path:
    """Write one JSON object a line, past all buffers, so that the last ones exist however the rank ends."""
    return home / f"rank{rank}.events"


def output_of(home: Path, rank: int, stream: str) -> Path:
    """``stream``: ``"out"``, ``"err"``, or ``"stacks"``."""
    return home / f"rank{rank}.{stream}"


def find(target: str) -> tuple[Any, str]:
    """The owner of ``"module:Class.method"`` or ``"module:function"``, and the name it has there.

    Raises:
        LookupError: there is no such thing (any more).
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{target} is not there ({error}). What took its place? Name that in points.py.") from error
    return owner, name


def wrap(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an object by ``make(original)``; see :func:`find`."""
    owner, name = find(target)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


class Injector:
    """One rank's.

    Attributes:
        step: number of the batch that began last, from 0; -1 before.
    """

    def __init__(self, orders: Orders, rank: int) -> None:
        self.home, self.rank, self.world = Path(orders.home), rank, orders.world
        mine = [fault for fault in (orders.fault, orders.meanwhile) if fault is not None and rank in fault.ranks]
        self.fault: Fault | None = mine[0] if mine else None
        self._others = () if orders.meanwhile is None else orders.meanwhile.ranks
        self.step = -1
        self.fired = False
        self._events = os.open(events_of(self.home, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.note("started", pid=os.getpid())

    def note(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), "step": self.step, **more})
        os.write(self._events, f"{line}\n".encode())

    def count_batches(self) -> None:
        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def training_step(*args: Any, **kwargs: Any) -> Any:
                self.step += 1
                return original(*args, **kwargs)

            return training_step

        wrap("lightning_zero.integrations.trainer.strategy:ZeroStrategy.training_step", counting)

    def reach(self, point: str, least: int) -> None:
        """``point`` is reached; ``least`` is the step before which nothing happens there unless the fault names one."""
        fault = self.fault
        if fault is None or self.fired or point != fault.point:
            return
        if self.step < (least if fault.step is None else fault.step):
            return
        self.fired = True
        if self.rank in self._others:
            self.note("busy")
        elif self._others:
            if not self.wait_for("busy", self._others):
                raise LookupError(f"ranks {self._others} were to be at something else, and never came to it")
            time.sleep(0.5)
        # Later lines are about the fault.
        written = {
            f"{rank}.{stream}": output_of(self.home, rank, stream).stat().st_size
            for rank in range(self.world)
            for stream in ("out", "err")
            if output_of(self.home, rank, stream).exists()
        }
        if self.rank not in self._others:
            self.note("fired", written=written)
        ACTIONS[fault.action](f"at {point} on rank {self.rank} in step {self.step}", fault)
        self.note("went on")

    def wait_for(self, what: str, ranks: Iterable[int], most_s: float = 60.0) -> bool:
        """Until one of these ranks has noted this; whether it did."""
        end = time.monotonic() + most_s
        files = [events_of(self.home, rank) for rank in ranks]
        while time.monotonic() < end:
            if any(file.exists() and f'"{what}"' in file.read_text() for file in files):
                return True
            time.sleep(0.02)
        return False

    def around(self, point: str, least: int, after: bool, skipped: Callable[..., Any]) -> Callable[..., Any]:
        """For :func:`wrap`: call ``reach(point)`` before, or after, the original.

        ``skipped`` gives the result, from the arguments, if the original is not called.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if after:
                    result = original(*args, **kwargs)
                    self.reach(point, least)
                    return result
                try:
                    self.reach(point, least)
                except Skip:
                    self.note("went on")
                    return skipped(*args, **kwargs)
                return original(*args, **kwargs)

            return wrapped

        return make
