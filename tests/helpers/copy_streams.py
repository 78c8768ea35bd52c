"""Emulate copy streams that run in any allowed order.

Each stream works only on request, so that a missing wait shows for any order of two streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch

from lightning_zero.offload.staging_ring import Copy

NAMES = ("in", "compute", "out")
ORDERS = list(permutations(NAMES))  # priorities of streams


class Event:
    done = False


class DelayedCopyStreams:
    """Run nothing before :meth:`run`.

    Args:
        without: a wait to leave out, such as ``"in behind compute"``, to show that it is needed.
    """

    def __init__(self, without: str = "") -> None:
        self._queues: dict[str, deque[Callable[[], bool]]] = {name: deque() for name in NAMES}
        self._lane_of: dict[int, str] = {}
        self._events: list[Event] = []  # keep them, so that their ids are not reused
        self._without = without
        self.used: list[torch.Tensor] = []

    def record_use(self, memory: torch.Tensor) -> None:
        self.used.append(memory)

    def compute(self, work: Callable[[], Any]) -> None:
        self._add("compute", work)

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return self._copy("in", copies, after)

    def copy_out(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return self._copy("out", copies, after)

    def compute_event(self) -> Event:
        return self._record("compute")

    def wait(self, event: Event) -> None:
        self._wait("compute", event)

    def waiting(self, lane: str) -> deque[Callable[[], bool]]:
        """Return the work that a stream has not done yet."""
        return self._queues[lane]

    def run(self, order: Sequence[str], all_of_it: bool = True) -> None:
        """Run the work of the streams, preferring them in this order."""
        while any(self._queues[name] for name in order):
            ready = next((queue for name in order if (queue := self._queues[name]) and queue[0]()), None)
            if ready is None:
                assert not all_of_it, "the lanes wait for each other"
                return
            ready.popleft()

    def _copy(self, lane: str, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        for event in after:
            self._wait(lane, event)
        for to, source in copies:
            self._add(lane, lambda to=to, source=source: to.copy_(source))
        return self._record(lane)

    def _add(self, lane: str, work: Callable[[], Any]) -> None:
        self._queues[lane].append(lambda: (work(), True)[1])

    def _wait(self, lane: str, event: Event) -> None:
        if self._without != f"{lane} behind {self._lane_of[id(event)]}":
            self._queues[lane].append(lambda: event.done)

    def _record(self, lane: str) -> Event:
        event = Event()
        self._events.append(event)
        self._lane_of[id(event)] = lane
        self._add(lane, lambda: setattr(event, "done", True))
        return event


class LateCopyStreams:
    """Emulate late copies on a CPU.

    Compute runs at once. A copy runs when it is waited for: its source must still be valid, and its target is NaN
    before.
    """

    def __init__(self) -> None:
        self.done = {"in": 0, "out": 0}  # copies
        self._queues: dict[str, deque[tuple[int, Sequence[Copy]]]] = {"in": deque(), "out": deque()}
        self._given = 0

    def record_use(self, memory: torch.Tensor) -> None:
        pass

    def copy_in(self, copies: Sequence[Copy], after: Sequence[Any]) -> tuple[str, int]:
        return self._copy("in", copies)

    def copy_out(self, copies: Sequence[Copy], after: Sequence[Any]) -> tuple[str, int]:
        return self._copy("out", copies)

    def compute_event(self) -> None:
        return None

    def wait(self, event: tuple[str, int]) -> None:
        lane, number = event
        while self._queues[lane] and self._queues[lane][0][0] <= number:
            for to, source in self._queues[lane].popleft()[1]:
                to.data.copy_(source)  # no change that autograd sees: a device's copies are late, too
            self.done[lane] += 1

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def _copy(self, lane: str, copies: Sequence[Copy]) -> tuple[str, int]:
        self._given += 1
        for to, _ in copies:
            spoil(to)
        self._queues[lane].append((self._given, copies))
        return lane, self._given


def spoil(tensor: torch.Tensor) -> None:
    """Fill with values that must not be read."""
    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 101)
