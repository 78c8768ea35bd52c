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

__all__ = ["LOOKS", "Outside", "Watched"]

Compiled = Callable[..., Any]

LOOKS = 3  # runs of one compiled graph after which nobody looks any more; in the first one kernels are still chosen


class _Gauge(Protocol):
    def lap(self) -> DeviceMemory:
        """What is in tensors now, and was at most since the last lap."""


class Outside:
    """Of one engine, or of one step on paper.

    Args:
        gauge: reads this rank's device.

    Attributes:
        of_each: what each compiled graph takes is looked at in its first runs, whatever step they are in.
    """

    def __init__(self, gauge: _Gauge) -> None:
        self._gauge = gauge
        self.of_each = False
        self._watches = self._inside = False
        self._resident = 0  # at the last change of sides
        self._parts = [0, 0]  # of what is in tensors now: outside, inside
        self._most = [0, 0]  # likewise, at most
        self._peak = 0
        self._copies = [0, 0]  # of calls whose backward is to come, each of which has its own: now, at most

    @property
    def watches(self) -> bool:
        """Whether a step is looked at."""
        return self._watches

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
        self.turn(inside=False)
        self._watches = False
        outside, inside = self._most
        return max(outside + inside + self._copies[1] - self._peak, 0)

    def drop(self) -> None:
        """Nothing is watched any more: the step was another than was thought."""
        self._watches = False

    def watched(self, compiled: Compiled, lasting: Callable[[], Iterable[Tensor]]) -> Watched:
        """The same, to be called instead of something compiled. ``lasting``: tensors that need no copy, since their
        memory stays where it is."""
        return Watched(compiled, lasting, self)

    def copy(self, nbytes: int) -> None:
        """A call has so many bytes of copies of its own from now on."""
        self._copies[0] += nbytes
        self._copies[1] = max(self._copies)

    def turn(self, inside: bool) -> DeviceMemory:
        """Compiled code begins, or has ended."""
        now, side = self._gauge.lap(), int(self._inside)
        if self._watches:  # or this is a backward that comes later
            self._peak = max(self._peak, now.allocated)
            self._most[side] = max(self._most[side], now.allocated - self._parts[1 - side])
            self._parts[side] += now.resident - self._resident
            self._resident, self._inside = now.resident, inside
        return now


class Watched:
    """Something compiled."""

    def __init__(self, compiled: Compiled, lasting: Callable[[], Iterable[Tensor]], outside: Outside) -> None:
        self._compiled = compiled
        self._lasting = lasting
        self._outside = outside
        self._runs = self._most = 0

    def takes(self) -> int:
        """Bytes that one run of it, forward and backward, has in tensors at most; 0 where nobody has looked."""
        return self._most

    def _took(self, nbytes: int) -> None:
        self._most = max(self._most, nbytes)

    def __call__(self, *args: Any) -> Any:
        outside = self._outside
        self._runs += outside.of_each
        looks = outside.of_each and 1 < self._runs <= LOOKS
        if not (outside.watches or looks):
            return self._compiled(*args)
        run = _Run(outside, self._took if looks else None)
        run.begins()
        outputs = self._compiled(*args)
        run.ends()
        given, known = [out for out in outputs if isinstance(out, Tensor)], {id(tensor) for tensor in self._lasting()}
        taken = [arg for arg in args if isinstance(arg, Tensor) and id(arg) not in known]
        # What comes in is copied, and what goes out is handed out as a copy; gradients likewise, on their way back.
        copies = sum(t.nbytes * (2 if t.requires_grad else 1) for t in [*taken, *given])
        outside.copy(copies)
        nodes, to_come = {out.grad_fn for out in given if out.grad_fn is not None}, [-copies]

        def has_ended(grads: Any = None, before: Any = None) -> None:  # must not hold the nodes, which hold it
            run.ends()
            if to_come:
                outside.copy(to_come.pop())

        for node in nodes:
            node.register_prehook(lambda grads: run.begins())
            node.register_hook(has_ended)
        if not nodes:
            has_ended()
        return outputs


class _Run:
    """A call, forward and backward. ``taken`` is told what it took, if anybody wants to know."""

    def __init__(self, outside: Outside, taken: Callable[[int], None] | None) -> None:
        self._outside, self._taken = outside, taken
        self._held = self._before = 0
        self._inside = False

    def begins(self) -> None:
        if self._outside.watches or self._taken:  # or this is a backward that comes after the step that was watched
            self._before, self._inside = self._outside.turn(inside=True).resident, True

    def ends(self) -> None:
        if not self._inside:
            return
        now, self._inside = self._outside.turn(inside=False), False
        if self._taken:
            self._taken(self._held + now.allocated - self._before)
        self._held += now.resident - self._before
