"""What a step takes outside of the code that is captured as CUDA graphs, and cannot share with it any more.

As long as compiled code is called, what it has let go of serves the loss that is computed of its outputs, and the other
way round. Graphs keep the memory that they were captured in: from then on both are there at once, as are copies of what
goes in and out, which graphs read and write where it was when they were captured. A step's peak grows by that, and a
plan has to know before. So one step is watched: what was in tensors at most inside of compiled calls, and outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from lightning_zero.profiling.headroom import DeviceMemory

__all__ = ["Outside"]

Compiled = Callable[..., Any]


class _Gauge(Protocol):
    def lap(self) -> DeviceMemory:
        """What is in tensors now, and was at most since the last lap."""


class Outside:
    """Of one engine, or of one step on paper.

    Args:
        gauge: reads this rank's device.
    """

    def __init__(self, gauge: _Gauge) -> None:
        self._gauge = gauge
        self._watches = self._inside = False
        self._resident = 0  # at the last change of sides
        self._parts = [0, 0]  # of what is in tensors now: outside, inside
        self._most = [0, 0]  # likewise, at most
        self._peak = 0
        self._copies = [0, 0]  # of calls whose backward is to come, each of which has its own: now, at most

    def begin(self) -> None:
        """A step begins that is watched."""
        self._watches, self._inside = True, False
        self._resident = self._peak = before = self._gauge.lap().resident
        self._parts, self._most = [before, 0], [before, 0]
        self._copies = [0, 0]

    def end(self) -> int:
        """It is over: by how many bytes more than it took a step will take whose compiled calls are captured."""
        if not self._watches:
            return 0
        self._turn(inside=False)
        self._watches = False
        outside, inside = self._most
        return max(outside + inside + self._copies[1] - self._peak, 0)

    def drop(self) -> None:
        """Nothing is watched any more: the step was another than was thought."""
        self._watches = False

    def watched(self, compiled: Compiled, lasting: Callable[[], Iterable[Tensor]]) -> Compiled:
        """The same, to be called instead of something compiled. ``lasting``: tensors that need no copy, since their
        memory stays where it is."""

        def run(*args: Any) -> Any:
            if not self._watches:
                return compiled(*args)
            self._turn(inside=True)
            outputs = compiled(*args)
            self._turn(inside=False)
            given, known = [out for out in outputs if isinstance(out, Tensor)], {id(tensor) for tensor in lasting()}
            taken = [arg for arg in args if isinstance(arg, Tensor) and id(arg) not in known]
            # What comes in is copied, and what goes out is handed out as a copy; gradients likewise, on their way back.
            copies = sum(t.nbytes * (2 if t.requires_grad else 1) for t in [*taken, *given])
            self._copy(copies)
            nodes, to_come = {out.grad_fn for out in given if out.grad_fn is not None}, [-copies]

            def has_ended(grads: Any = None, before: Any = None) -> None:  # must not hold the nodes, which hold it
                self._turn(inside=False)
                if to_come:
                    self._copy(to_come.pop())

            for node in nodes:
                node.register_prehook(lambda grads: self._turn(inside=True))
                node.register_hook(has_ended)
            if not nodes:
                has_ended()
            return outputs

        return run

    def _copy(self, nbytes: int) -> None:
        self._copies[0] += nbytes
        self._copies[1] = max(self._copies)

    def _turn(self, inside: bool) -> None:
        if not self._watches:  # a backward that comes later
            return
        now, side = self._gauge.lap(), int(self._inside)
        self._peak = max(self._peak, now.allocated)
        self._most[side] = max(self._most[side], now.allocated - self._parts[1 - side])
        self._parts[side] += now.resident - self._resident
        self._resident, self._inside = now.resident, inside
