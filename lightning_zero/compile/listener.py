"""Who is told what the compiler does, and what an engine makes of it: lines for the user, graphs for observers, and a
note to the other ranks that this one is busy."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from torch.fx import Graph

from lightning_zero.compile.active import OPTIMIZATION_COUNTS
from lightning_zero.compile.passes.pass_trace import PassTrace

__all__ = ["CompileListener", "GraphObserver", "PassObserver", "CompileProgress"]

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
        spent: seconds of "compiling", and of the "passes" therein; the number of "graphs";
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
