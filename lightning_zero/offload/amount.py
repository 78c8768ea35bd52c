"""How much of what is saved for backward a pass sends to the host, where an amount is named for all of it.

Graphs are compiled one by one, each when it is first called, and nobody knows then how many will follow. So a graph may
send what is left of the amount in the pass that is under way: of that the current call's part, since modules that look
alike run one graph, and later calls are to have as much. How many calls of compiled modules a pass has, the first step
has shown. So no pass sends more than the amount, and nothing is compiled twice for it, as long as no graph runs more
than once in a call, or in modules that do not look alike, no call comes that the first step did not have, and batches
are as large as those compiled for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["OffloadQuota"]


@dataclass
class OffloadQuota:
    """Of one engine.

    Attributes:
        calls: of compiled modules in a pass.
        sent: bytes that have left in this one.
        beyond: who was called, in words, when more had left than was named; empty where that is not so.
    """

    calls: int = 1
    sent: int = 0
    beyond: str = ""
    _most: float = math.inf
    _number: int = 0  # of the current call
    _before: int = 0  # sent when it began
    _called: str = "a module"

    def begin_pass(self, most: float = math.inf) -> None:
        """``most``: bytes that are to leave in it."""
        self.sent = self._number = self._before = 0
        self.beyond, self._most = "", most

    def begin_call(self, called: str) -> None:
        """Of a compiled module."""
        self._number += 1
        self._before, self._called = self.sent, called

    def send(self, nbytes: int) -> None:
        """So much leaves."""
        self.sent += nbytes
        if self.sent > self._most and not self.beyond:
            self.beyond = self._called

    def left(self, most: float) -> float:
        """Bytes that may leave from a graph that is compiled now, of ``most`` in all of the pass."""
        part = (most - self._before) / max(self.calls - self._number + 1, 1)
        return max(part - (self.sent - self._before), 0.0)
