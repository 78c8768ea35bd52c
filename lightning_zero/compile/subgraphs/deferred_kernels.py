"""Kernels of pieces are compiled by other processes, or threads, while the next pieces are lowered: a forward's while
its backward is. Inductor waits for those of one graph before it goes on to another; with dozens of pieces that is most
of the time of lowering them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_zero.compat.cache_saves import DEFERRED_KERNELS
from lightning_zero.compat.compiler import AsyncCompile, TritonBundler
from lightning_zero.compat.patches import swap_attribute

__all__ = ["DeferredKernels"]


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
