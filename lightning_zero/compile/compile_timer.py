"""Where the seconds of one graph's compilation go: its forward, its backward; and a backward that is compiled late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from torch.fx import Graph

from lightning_zero.compile.graph import graph_kind
from lightning_zero.compile.listener import CompileListener
from lightning_zero.compile.subgraphs import DeferredKernels

__all__ = ["CompileTimer"]


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
