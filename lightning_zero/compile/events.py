"""Who is told what the compiler does, and what an engine makes of it: lines for the user, graphs for observers, and a
note to the other ranks that this one is busy."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Protocol

from torch.fx import Graph

from lightning_zero.compat.cuts import HAS_ITS_OWN
from lightning_zero.compat.patches import PATCHES
from lightning_zero.compile.async_compile import DeferredKernels
from lightning_zero.compile.fx_utils import graph_kind
from lightning_zero.compile.passes.base import PassTrace

__all__ = [
    "CompileListener",
    "CompileProgress",
    "CompileTimer",
    "GraphObserver",
    "OPTIMIZATION_COUNTS",
    "OptimizationCounts",
    "PassObserver",
    "left_out",
]


log = logging.getLogger(__name__)

GraphObserver = Callable[[str, Graph], None]  # (what: "joint", "before" or "after" passes, graph)
PassObserver = Callable[[PassTrace], None]  # after each pass, between "before" and "after"


class CompileListener(Protocol):
    """Is told what the compiler does."""

    def report(self, line: str) -> None:
        """A line for the user."""

    def graph(self, what: str, graph: Graph) -> None:
        """A graph, "joint" or "before" or "after" the passes; valid during the call only."""

    def pass_ran(self, trace: PassTrace) -> None:
        """What a pass did to the graph that was seen "before"; only where that is wanted."""

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        """A graph, described in words, begins to be compiled (``busy``), or has been, in so many seconds; ``what`` then
        says how these are spent, and may be empty."""

    def add_metric(self, what: str, amount: float) -> None:
        """So many seconds went into that; or so many pieces were made."""

    @property
    def wants_graphs(self) -> bool:
        """Whether every graph must be seen, even one that could come out of a cache."""

    @property
    def wants_passes(self) -> bool:
        """Whether what each pass does must be seen."""


class CompileProgress:
    """The listener of one engine. Knows nothing of the engine: torch keeps what it has compiled, and with it the
    compiler and its listener, for as long as the process lives.

    Args:
        busy_for_others: tells the other ranks that this one compiles, or has done so.
        busy: is told what takes long, in words, and "" when it is over.
        report: shows a line to the user; called on every rank.

    Attributes:
        compiled: how often a graph began to be compiled, or has been.
        spent: seconds of "compiling", and of the "passes" and the "chart" of budgets therein; the number of "graphs";
            of "pieces" that these were cut into, and of "pieces compiled".
    """

    def __init__(
        self,
        busy_for_others: Callable[[bool], None],
        busy: Callable[[str], None] = lambda what: None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._busy_for_others = busy_for_others
        self._busy = busy
        self._report = report or log.info
        self._graph_observers: list[GraphObserver] = []
        self._pass_observers: list[PassObserver] = []
        self.compiled = 0
        self.metrics: defaultdict[str, float] = defaultdict(float)

    def report(self, line: str) -> None:
        """Shows a line to the user."""
        self._report(line)

    def observe(self, observer: GraphObserver) -> None:
        """``observer`` sees every graph that is compiled from now on; it must not keep graphs."""
        self._graph_observers.append(observer)

    def observe_passes(self, observer: PassObserver) -> None:
        """``observer`` is told what each pass does to each graph that is compiled from now on."""
        self._pass_observers.append(observer)

    # -- what a CompileListener is told

    @property
    def wants_graphs(self) -> bool:
        return bool(self._graph_observers)

    @property
    def wants_passes(self) -> bool:
        return bool(self._pass_observers)

    def graph(self, what: str, graph: Graph) -> None:
        for observer in self._graph_observers:
            observer(what, graph)

    def pass_ran(self, trace: PassTrace) -> None:
        for observer in self._pass_observers:
            observer(trace)

    def add_metric(self, what: str, amount: float) -> None:
        self.metrics[what] += amount

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        self.compiled += 1
        if busy:
            self.report(f"Compiling {what}; this step takes longer.")
        else:
            self.report(f"Compiled it in {seconds:.1f} s{f' ({what})' if what else ''}.")
            self.add_metric("graphs", 1)
            self.add_metric("compiling", seconds)
            log.debug("In use: %s", OPTIMIZATION_COUNTS.text())
        self._busy(f"compiling {what}," if busy else "")
        with suppress(Exception):  # an exception of the compiler must not be hidden by one of the store
            self._busy_for_others(busy)


class OptimizationCounts(Counter[str]):
    """Counts in one process, as torch shares what it has compiled between engines.

    "layers stamped" and "layers traced" by Dynamo; "layers" in joint graphs and the "layers differentiated" for them;
    "pieces" of graphs and the "pieces compiled" for them.
    """

    def text(self) -> str:
        """Return one line for the log."""
        counts = ", ".join(f"{what} {number}" for what, number in sorted(self.items()) if number)
        cut = "torch's" if HAS_ITS_OWN else "ours"
        out = "; ".join(left_out())
        return f"{counts or 'nothing yet'}; smallest cuts: {cut}; left out: {out or 'nothing'}"


OPTIMIZATION_COUNTS = OptimizationCounts()


def left_out() -> list[str]:
    """Return the features that are left out with this torch, each with the reason."""
    return [f"{patch.feature} ({patch.reason})" for patch in PATCHES if patch.reason]


class CompileTimer:
    """Of one call of the backend, and of the backward that torch compiles later, where trainings keep graphs.

    Args:
        called: the module, in words.
        listener: is told when that is over, and of what is compiled later.

    Attributes:
        kernels: of the graphs' pieces.
        over: :meth:`end` was called.
    """

    def __init__(self, called: str, listener: CompileListener) -> None:
        self._called = called
        self._listener = listener
        self._seconds: dict[str, float] = {}
        self.kernels = DeferredKernels()
        self.over = False

    @contextmanager
    def measure(self, graph: Graph) -> Iterator[None]:
        """Surrounds what is done to a graph after partitioning."""
        kind, begun = graph_kind(graph), monotonic()
        if self.over:  # nobody else says that this takes long
            self._listener.compiling(f"the {kind} of {self._called} for training", True, 0.0)
        try:
            yield
        finally:
            seconds = monotonic() - begun
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
            if self.over:
                self._listener.compiling("", False, seconds)

    def end(self, seconds: float) -> None:
        """The call of the backend is over, and what it left to be done; both took so many seconds."""
        self.over = True
        self._listener.compiling(self._in_words(), False, seconds)

    def _in_words(self) -> str:
        """What the seconds went into."""
        if not self._seconds:
            return "out of torch's cache"
        return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in self._seconds.items())
