"""A clock for waits with limits: tests of them take no time, and a busy machine cannot change their outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["SimulatedClock"]

PATIENCE_S = 60.0  # of a real clock: otherwise a thread neither sleeps nor ends
MOST_S = 3600.0  # otherwise a wait has no limit


class SimulatedClock:
    """Replaces the module ``time`` where threads of :meth:`run` wait.

    It advances when all of them sleep, to the first end of a sleep.
    """

    def __init__(self) -> None:
        self._now, self._awake = 0.0, 0
        self._ends: list[float] = []
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        with self._changed:
            end = self._now + seconds
            assert end < MOST_S, "a wait does not end"
            self._ends.append(end)
            self._rest()
            assert self._changed.wait_for(lambda: self._now >= end, PATIENCE_S), "a thread neither sleeps nor ends"

    def stop(self, seconds: float) -> None:
        """Advance while a thread is awake, as if all processes were stopped for these seconds."""
        with self._changed:
            self._now += seconds

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of the calls, each in a thread of its own."""
        self._awake = len(calls)

        def one(call: Callable[[], Any]) -> Any:
            try:
                return call()
            finally:
                with self._changed:
                    self._rest()

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(one, calls))

    def _rest(self) -> None:
        """Count a thread out that sleeps or ends; call with the lock."""
        self._awake -= 1
        if self._awake == 0 and self._ends:
            self._now = max(self._now, min(self._ends))
            asleep = [end for end in self._ends if end > self._now]
            self._awake, self._ends = len(self._ends) - len(asleep), asleep
            self._changed.notify_all()
