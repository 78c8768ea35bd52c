"""Report how the seconds until a training's steady steps were spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lightning_zero.compat.compiler import compilation_times
from lightning_zero.compat.lookup import Absent

__all__ = ["StartupTimer"]

BATCHES = 10  # least number before the report
QUIET = 3  # consecutive batches in which nothing was compiled
MOST_BATCHES = 100  # the report comes then even if batches of new lengths keep compiling

# Keys of torch's compilation times.
DYNAMO, IN_BACKENDS, JOINT = "_compile.compile_inner", "OutputGraph.call_user_compiler", "aot_trace_joint_graph"


def _compilation_seconds() -> dict[str, float]:
    if isinstance(compilation_times, Absent):
        return {}
    return {what: sum(seconds) for what, seconds in compilation_times.items()}


class StartupTimer:
    """Times the start of a training, from its construction at the beginning of a stage.

    Call :meth:`batch` before each training batch until it returns lines, and :meth:`ends` after the training.

    Args:
        spent: returns the seconds and counts of :class:`~lightning_zero.compile.events.Progress`; empty without an
            engine.
        compiler: torch's name of the backend.
        running: returns the line about what runs; "" for none.
        clock: returns seconds.
        of_torch: returns torch's compilation seconds by key.
    """

    def __init__(
        self,
        spent: Callable[[], Mapping[str, float]],
        compiler: str = "inductor",
        running: Callable[[], str] = str,  # a Trainer may be pickled, which a lambda could not
        clock: Callable[[], float] = time.monotonic,
        of_torch: Callable[[], Mapping[str, float]] = _compilation_seconds,
    ) -> None:
        self._spent, self._clock, self._of_torch = spent, clock, of_torch
        self._running = running
        self._compiler = "Inductor" if compiler == "inductor" else compiler
        self._begun, self._before, self._torch_before = clock(), dict(spent()), dict(of_torch())
        self._built = 0.0
        self._batches: list[float] = []  # when they began
        self._graphs = self._quiet = 0.0
        self._over = False

    def built(self, seconds: float) -> None:
        """Add the seconds of the executor's build. Compilation until then did not belong to the model."""
        self._built += seconds
        self._torch_before = dict(self._of_torch())

    def batch(self) -> list[str]:
        """Call when a batch begins. Return the lines once, when the start is over."""
        if self._over:
            return []
        graphs = self._since("graphs")
        self._quiet = self._quiet + 1 if graphs == self._graphs else 0
        self._graphs = graphs
        done = len(self._batches)
        self._batches.append(self._clock())
        if done < BATCHES or (self._quiet < QUIET and done < MOST_BATCHES):
            return []
        return self._lines(done)

    def ends(self) -> list[str]:
        """Call when the training ends. Return the lines unless they were returned before."""
        return [] if self._over or not self._batches else self._lines(len(self._batches))

    def _lines(self, batches: int) -> list[str]:
        self._over = True
        try:
            running = self._running()
        except Exception as error:  # a report must not fail a training
            running = f"The startup summary failed: {type(error).__name__}: {error}."
        return [line for line in (self._line(batches), running) if line]

    def _line(self, batches: int) -> str | None:
        if not self._since("graphs") and not self._built:
            return None  # everything was in caches
        total = self._clock() - self._begun
        passes, joint = self._since("passes"), self._of_torch_since(JOINT)
        parts = [
            ("build", self._built),
            ("until the first step", self._batches[0] - self._begun - self._built),
            ("first step, eagerly", self._batches[1] - self._batches[0] if batches > 1 else 0.0),
            ("Dynamo", self._of_torch_since(DYNAMO) - self._of_torch_since(IN_BACKENDS)),
            ("joint graph", joint),
            ("passes", passes),
            (self._compiler + self._subgraphs(), self._since("compiling") - joint - passes),
        ]
        parts.append(("the other steps", total - sum(seconds for _, seconds in parts)))
        shown = ", ".join(f"{what} {max(seconds, 0.0):.1f}" for what, seconds in parts)
        return f"Start: {total:.1f} s to the end of step {batches}: {shown}."

    def _subgraphs(self) -> str:
        total, compiled = int(self._since("subgraphs")), int(self._since("subgraphs compiled"))
        return f" ({compiled} subgraphs compiled, {total - compiled} reused)" if total else ""

    def _since(self, what: str) -> float:
        return self._spent().get(what, 0.0) - self._before.get(what, 0.0)

    def _of_torch_since(self, what: str) -> float:
        return self._of_torch().get(what, 0.0) - self._torch_before.get(what, 0.0)
