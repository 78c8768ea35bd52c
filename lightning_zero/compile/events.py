"""Events and metrics of compilation: user lines, graph observers, and busy flags for other ranks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from torch.fx import Graph

from lightning_zero.compat.patches import PATCHES
from lightning_zero.compile.async_compile import DeferredKernels
from lightning_zero.compile.fx_utils import graph_kind
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.task_progress import TaskProgress

log = logging.getLogger(__name__)

GraphObserver = Callable[[str, Graph], None]  # ("joint", or "before" or "after" the passes; graph)
PassObserver = Callable[[PassTrace], None]  # called after each pass, between "before" and "after"


class CompileProgress:
    """Events of one engine.

    It must not reference the engine, since torch keeps compiled code for the life of the process.

    Args:
        busy_for_others: informs other ranks that this one compiles, or has finished.
        busy: called with a description when a long task starts, and with "" when it ends.
        report: logs a line for the user; called on every rank.
        tasks: shows the user how long compilations take.

    Attributes:
        tasks: the argument.
        compiled: number of beginnings and ends of compilations.
        metrics: seconds of "compiling", and of the "passes" and of tracing "joint" graphs in it; numbers of "graphs",
            of "subgraphs" and of "subgraphs compiled".
    """

    def __init__(
        self,
        busy_for_others: Callable[[bool], None],
        busy: Callable[[str], None] = lambda what: None,
        report: Callable[[str], None] | None = None,
        tasks: TaskProgress | None = None,
    ) -> None:
        self.tasks = tasks or TaskProgress()
        self._busy_for_others = busy_for_others
        self._busy = busy
        self._report = report or log.info
        self._graph_observers: list[GraphObserver] = []
        self._pass_observers: list[PassObserver] = []
        self.compiled = 0
        self.metrics: defaultdict[str, float] = defaultdict(float)

    def report(self, line: str) -> None:
        self._report(line)

    def observe(self, observer: GraphObserver) -> None:
        """Call ``observer`` with every graph compiled from now on. It must not keep graphs."""
        self._graph_observers.append(observer)

    def observe_passes(self, observer: PassObserver) -> None:
        """Call ``observer`` with the effect of each pass on graphs compiled from now on."""
        self._pass_observers.append(observer)

    # -- events of the compiler

    @property
    def wants_graphs(self) -> bool:
        """Return True if observers need every graph, also those that a cache holds."""
        return bool(self._graph_observers)

    @property
    def wants_passes(self) -> bool:
        """Return True if observers need the effect of each pass."""
        return bool(self._pass_observers)

    def graph(self, what: str, graph: Graph) -> None:
        """Show a graph: "joint", or "before" or "after" the passes. It is valid only during the call."""
        for observer in self._graph_observers:
            observer(what, graph)

    def pass_ran(self, trace: PassTrace) -> None:
        """Report the effect of one pass; called only if :attr:`wants_passes`."""
        for observer in self._pass_observers:
            observer(trace)

    def add_metric(self, what: str, amount: float) -> None:
        """Add seconds or a count to a metric."""
        self.metrics[what] += amount

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        """Report that a compilation begins (``busy``) or ended after ``seconds``.

        Args:
            what: the module and its purpose at the beginning; the parts of the seconds, or "", at the end.
        """
        self.compiled += 1
        if busy:
            self.tasks.begin(f"Compiling {what}")
            log.debug("Compile: begin (module=%s)", what)
        else:
            self.tasks.end()
            log.debug("Compile: end (seconds=%.1f, parts=%s)", seconds, what or "none")
            self.add_metric("graphs", 1)
            self.add_metric("compiling", seconds)
            log.debug("In use: %s", OPTIMIZATION_COUNTS.text())
        self._busy(f"compiling {what}," if busy else "")
        with suppress(Exception):  # an error of the store must not replace one of the compiler
            self._busy_for_others(busy)


class OptimizationCounts(Counter[str]):
    """Counts of optimizations in use, per process.

    A count of zero shows an optimization that a new torch has disabled.

    "layers stamped" and "layers traced" by Dynamo; "layers" in joint graphs and "layers differentiated" for them;
    "subgraphs" and "subgraphs compiled".
    """

    def text(self) -> str:
        """Return one line for the log."""
        counts = ", ".join(f"{what} {number}" for what, number in sorted(self.items()) if number)
        out = "; ".join(left_out())
        return f"{counts or 'nothing yet'}; left out: {out or 'nothing'}"


OPTIMIZATION_COUNTS = OptimizationCounts()


def left_out() -> list[str]:
    """Return the features that this torch lacks, each with the reason."""
    return [f"{patch.feature} ({patch.reason})" for patch in PATCHES if patch.reason]


class CompileTimer:
    """Measure the compilation of one graph's forward and backward, even if backward is compiled later.

    Attributes:
        over: True after :meth:`end`.
    """

    def __init__(self, called: str, listener: CompileProgress) -> None:
        self._called = called
        self._listener = listener
        self._seconds: dict[str, float] = {}
        self.kernels = DeferredKernels()
        self.over = False

    @contextmanager
    def measure(self, graph: Graph) -> Iterator[None]:
        """Return a context that measures the compilation of a partitioned graph."""
        kind, begun = graph_kind(graph), monotonic()
        if self.over:  # no other code reports a late backward
            self._listener.compiling(f"{self._called} for training ({kind})", True, 0.0)
        self._listener.tasks.stage(kind)
        try:
            yield
        finally:
            seconds = monotonic() - begun
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
            if self.over:
                self._listener.compiling("", False, seconds)

    def end(self, seconds: float) -> None:
        """Report the total seconds of the backend's call and the work that it deferred."""
        self.over = True
        self._listener.compiling(self._in_words(), False, seconds)

    def _in_words(self) -> str:
        if not self._seconds:
            return "out of torch's cache"
        return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in self._seconds.items())
