"""What is left of compiling a graph when the backend gives it back: to wait for its kernels, which other processes
compile, and to keep them for later trainings. Dynamo makes its guards in the meantime, seconds of a deep model's start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_zero.compat.compiler import functorch_config
from lightning_zero.compat.saves import saved_later
from lightning_zero.compile.pieces import Kernels

__all__ = ["Rest", "Unfinished"]


class Rest(ExitStack):
    """Of one graph; a context in which it is compiled.

    Args:
        kernels: of its pieces.
        settings: of functorch, that it is compiled with.
    """

    def __init__(self, kernels: Kernels, settings: dict[str, Any]) -> None:
        super().__init__()
        self._kernels = kernels
        self._settings = settings
        self._saves: list[Callable[[], Any]] = []

    def __enter__(self) -> Rest:
        self.enter_context(self._kernels)
        self.enter_context(saved_later(self._saves))
        return self

    def __call__(self) -> None:
        """Does it."""
        self._kernels.finish()
        with functorch_config.patch(self._settings):
            for save in self._saves:
                save()


class Unfinished:
    """What is left of graphs that have not been called yet."""

    def __init__(self) -> None:
        self._left: list[tuple[Callable[[], None], float, Callable[[float], None]]] = []

    def add(self, rest: Callable[[], None], seconds: float, end: Callable[[float], None]) -> None:
        """
        Args:
            rest: what is left.
            seconds: that the graph took so far.
            end: is told the seconds of all, whether or not it failed.
        """
        self._left.append((rest, seconds, end))

    def finish(self) -> None:
        """Does it all, before any of these runs. Harmless when repeated."""
        while self._left:
            rest, seconds, end = self._left.pop(0)
            begun = time.monotonic()
            try:
                rest()
            finally:
                end(seconds + time.monotonic() - begun)
