"""What is left of compiling a graph when the backend gives it back: to wait for its kernels, which other processes
compile, and to keep them for later trainings. Dynamo makes its guards in the meantime, seconds of a deep model's start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from time import monotonic
from typing import Any

from lightning_zero.compat.cache_saves import DEFERRED_KERNELS, defer_cache_saves
from lightning_zero.compat.compiler import AsyncCompile, TritonBundler, functorch_config
from lightning_zero.compat.patches import swap_attribute

__all__ = ["DeferredKernels", "PendingCompile", "PendingCompiles"]


log = logging.getLogger(__name__)


class PendingCompile(ExitStack):
    """Of one graph; a context in which it is compiled.

    Args:
        kernels: of its pieces.
        settings: of functorch, that it is compiled with.
    """

    def __init__(self, kernels: DeferredKernels, settings: dict[str, Any]) -> None:
        super().__init__()
        self._kernels = kernels
        self._settings = settings
        self._saves: list[Callable[[], Any]] = []

    def __enter__(self) -> PendingCompile:
        self.enter_context(self._kernels)
        self.enter_context(defer_cache_saves(self._saves))
        return self

    def __call__(self) -> None:
        """Does it."""
        self._kernels.finish()
        with functorch_config.patch(self._settings):
            for save in self._saves:
                save()


class PendingCompiles:
    """What is left of graphs that have not been called yet."""

    def __init__(self) -> None:
        self._left: list[tuple[Callable[[], None], float, Callable[[float], None] | None]] = []
        self._lock = RLock()

    def add(self, rest: Callable[[], None], seconds: float, end: Callable[[float], None]) -> None:
        """
        Args:
            rest: what is left.
            seconds: that the graph took so far.
            end: is told the seconds of all, whether or not it failed.
        """
        self._left.append((rest, seconds, end))

    def finish(self) -> None:
        """Does it all, before any of these runs, in whatever thread: the others wait. What fails, or is interrupted, is
        left to be done. Harmless when repeated."""
        if not self._left:  # asked by each call
            return
        with self._lock:
            while self._left:
                rest, seconds, end = self._left[0]
                begun = monotonic()
                try:
                    rest()
                except BaseException:
                    self._left[0] = rest, seconds, None
                    raise
                else:
                    self._left.pop(0)
                finally:
                    if end is not None:
                        end(seconds + monotonic() - begun)

    def finish_after(self, failure: BaseException | None) -> None:
        """Where nobody may have called them: Dynamo has failed behind the backend, and this rank is busy until then.

        Args:
            failure: that is under way, and is not to be hidden by another one.
        """
        try:
            self.finish()
        except Exception:
            if failure is None:
                raise
            log.warning("What was left of a compilation failed, too.", exc_info=True)


class DeferredKernels:
    """Those of pieces that were lowered; a context that waits for them when it ends in an error: other graphs may have
    the same pieces."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []
        self._subgraphs: list[tuple[Any, list[Callable[[], None]]]] = []

    def __enter__(self) -> DeferredKernels:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.finish()

    @DEFERRED_KERNELS
    @contextmanager
    def defer(self) -> Iterator[None]:
        """A context in which nobody waits for kernels."""
        now, mine = AsyncCompile.wait, threading.get_ident()

        def later(compiler: Any, scope: dict[str, Any]) -> None:
            if threading.get_ident() == mine:
                self._waits.append(partial(now, compiler, scope))
            else:
                now(compiler, scope)

        try:
            with swap_attribute(AsyncCompile, "wait", later):
                yield
        finally:
            self.assign_to(None)  # those of a piece that failed half-way: others may find its code in memory

    def assign_to(self, compiled: Any) -> None:
        """What nobody has waited for since the last call belongs to this piece."""
        self._subgraphs.append((compiled, self._waits))
        self._waits = []

    def finish(self) -> None:
        """Waits for all, and gives each piece its own. Harmless when repeated; those before which it fails, or is
        interrupted, are waited for then."""
        while self._subgraphs:
            compiled, waits = self._subgraphs[0]
            if waits:
                _finish(compiled, waits)
            self._subgraphs.pop(0)


def _finish(compiled: Any, waits: list[Callable[[], None]]) -> None:
    TritonBundler.begin_compile()
    try:
        for wait in waits:
            wait()
        bundle, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
    # One that came out of Inductor's cache may have brought them along.
    kept = getattr(compiled, "_triton_bundle", None)
    if hasattr(compiled, "set_triton_bundle") and not (kept and (kept.kernel_artifacts or kept.static_autotuners)):
        compiled.set_triton_bundle(bundle)
