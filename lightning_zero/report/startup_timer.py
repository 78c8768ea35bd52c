"""Report how the seconds until a training's steady steps were spent.

Parts do not overlap and add up to the total: compilation is subtracted from the phase in which it happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_zero.compat.compiler import compilation_times
from lightning_zero.compat.lookup import Absent

log = logging.getLogger(__name__)

BATCHES = 10  # least number before the report
QUIET = 3  # consecutive batches in which nothing was compiled
MOST_BATCHES = 100  # the report comes then even if batches of new lengths keep compiling
SHORTEST_S = 0.05  # parts below it would be shown as 0.0 s

# Keys of torch's compilation times.
DYNAMO, IN_BACKENDS = "_compile.compile_inner", "OutputGraph.call_user_compiler"


def _compilation_seconds() -> dict[str, float]:
    if isinstance(compilation_times, Absent):
        return {}
    return {what: sum(seconds) for what, seconds in compilation_times.items()}


@dataclass(frozen=True)
class _Mark:
    """A moment, and the seconds of compilation until then. ``joint_s`` is a part of ``backend_s``."""

    at_s: float
    dynamo_s: float = 0.0
    backend_s: float = 0.0
    joint_s: float = 0.0

    def without_compiling(self, end: _Mark) -> float:
        """Return the seconds from here to ``end`` in which nothing was compiled."""
        return (end.at_s - self.at_s) - (end.dynamo_s - self.dynamo_s) - (end.backend_s - self.backend_s)


class StartupTimer:
    """Times the start of a training, from its construction at the beginning of a stage.

    Call :meth:`batch` before each training batch until it returns lines, and :meth:`ends` after the training. If
    :meth:`ends` may be called long after the training, call :meth:`pause` after each batch.

    Args:
        spent: returns the seconds and counts of :class:`~lightning_zero.compile.events.CompileProgress`; empty without
            an engine.
        running: returns the line about what runs; "" for none.
    """

    def __init__(
        self,
        spent: Callable[[], Mapping[str, float]],
        running: Callable[[], str] = str,  # a Trainer may be pickled, which a lambda could not
        clock: Callable[[], float] = time.monotonic,
        of_torch: Callable[[], Mapping[str, float]] = _compilation_seconds,
    ) -> None:
        self._spent, self._clock, self._of_torch = spent, clock, of_torch
        self._running = running
        self._begun_s, self._built_s = clock(), 0.0
        self._forget_compilations()
        self._batches = 0
        self._marks: list[_Mark] = []  # the beginnings of the first and the second batch
        self._graphs = self._quiet = 0.0
        self._over = False
        self._paused: _Mark | None = None  # the end of the last batch, if the caller announces it

    def built(self, seconds: float) -> None:
        """Add the seconds of the executor's build. Compilation until then did not belong to the model."""
        self._built_s += seconds
        self._forget_compilations()

    def adopted(self) -> None:
        """Ignore what an earlier Trainer compiled for the module's engine."""
        self._forget_compilations()

    def _forget_compilations(self) -> None:
        self._before, self._dynamo_s, self._torch_before = dict(self._spent()), 0.0, (0.0, 0.0)
        self._dynamo_seconds()
        self._dynamo_s = 0.0

    def batch(self) -> list[str]:
        """Call when a batch begins. Return the lines once, when the start is over."""
        if self._over:
            return []
        graphs = self._since("graphs")
        self._quiet = self._quiet + 1 if graphs == self._graphs else 0
        self._graphs = graphs
        done, mark = self._batches, self._mark()
        self._paused = None
        self._batches += 1
        if done < 2:
            self._marks.append(mark)
        if done < BATCHES or (self._quiet < QUIET and done < MOST_BATCHES):
            return []
        return self._lines(done)

    def pause(self) -> None:
        """Call when a batch has ended. Time until :meth:`ends` does not count if no batch follows."""
        if not self._over and self._batches:
            self._paused = self._mark()

    def ends(self) -> list[str]:
        """Call after the training. Return the lines unless they were returned before."""
        return [] if self._over or not self._batches else self._lines(self._batches)

    def _lines(self, batches: int) -> list[str]:
        self._over = True
        line = self._line(batches)
        try:
            running = self._running()
        except Exception as error:  # a report must not fail a training
            running = f"The startup summary failed: {type(error).__name__}: {error}."
        return [found for found in (line, running) if found]

    def _line(self, batches: int) -> str | None:
        if not self._since("graphs") and not self._built_s:
            return None  # everything was in caches
        end = self._paused or self._mark()
        first, second = self._marks[0], [*self._marks, end][1]
        begun = _Mark(self._begun_s)
        parts = {
            "build": self._built_s,
            "setup": begun.without_compiling(first) - self._built_s,
            "first batch": first.without_compiling(second),
            "tracing": end.dynamo_s + end.joint_s,
            "compiling": end.backend_s - end.joint_s,
            "other batches": second.without_compiling(end),
        }
        subgraphs, compiled = self._since("subgraphs"), self._since("subgraphs compiled")
        log.debug(
            "Start: compilation (dynamo_s=%.1f, joint_graph_s=%.1f, passes_s=%.1f, backend_s=%.1f, "
            "subgraphs_compiled=%d, subgraphs_reused=%d)",
            end.dynamo_s, end.joint_s, self._since("passes"), end.backend_s, compiled, subgraphs - compiled,
        )  # fmt: skip
        shown = " + ".join(f"{what} {seconds:.1f}" for what, seconds in parts.items() if seconds >= SHORTEST_S)
        return f"Start: {end.at_s - self._begun_s:.1f} s until batch {batches} = {shown}."

    def _mark(self) -> _Mark:
        return _Mark(self._clock(), self._dynamo_seconds(), self._since("compiling"), self._since("joint"))

    def _dynamo_seconds(self) -> float:
        """Return Dynamo's seconds without its backends.

        Call it at each batch: ``torch.compiler.reset()`` clears the seconds that torch counts.
        """
        of_torch = self._of_torch()
        now = of_torch.get(DYNAMO, 0.0), of_torch.get(IN_BACKENDS, 0.0)
        before = self._torch_before if now[0] >= self._torch_before[0] else (0.0, 0.0)
        self._dynamo_s += max((now[0] - before[0]) - (now[1] - before[1]), 0.0)
        self._torch_before = now
        return self._dynamo_s

    def _since(self, what: str) -> float:
        return self._spent().get(what, 0.0) - self._before.get(what, 0.0)
