"""Finish compilations after the backend returns.

Other processes compile kernels while the next subgraphs are lowered, and while Dynamo builds guards.
:class:`DeferredKernels` collects the waits, :class:`PendingCompiles` runs them before the first call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import RLock, Thread
from time import monotonic
from typing import Any

import torch
from functorch.compile import config as functorch_config

from lightning_zero.compat.compiler import (
    DEFERRED_KERNELS,
    TritonBundler,
    defer_cache_saves,
    maybe_warm_pool,
    triton_key,
)
from lightning_zero.config import CompileConfig

log = logging.getLogger(__name__)


class PendingCompile(ExitStack):
    """The unfinished part of one graph's compilation; also the context in which it is compiled.

    ``stage`` shows the user the part of the compilation that begins.
    """

    def __init__(
        self, kernels: DeferredKernels, settings: dict[str, Any], stage: Callable[[str], None] | None = None
    ) -> None:
        super().__init__()
        self._stage = stage
        self._kernels = kernels
        self._settings = settings
        self._saves: list[Callable[[], Any]] = []

    def __enter__(self) -> PendingCompile:
        self.enter_context(self._kernels)
        self.enter_context(defer_cache_saves(self._saves))
        return self

    def __call__(self) -> None:
        """Wait for kernels and save the graph in caches."""
        if self._stage is not None:
            self._stage("waiting for kernels")
        self._kernels.finish()
        with functorch_config.patch(self._settings):
            for save in self._saves:
                save()


class PendingCompiles:
    """Compilations of graphs that have not been called yet."""

    def __init__(self) -> None:
        self._pending: list[tuple[Callable[[], None], float, Callable[[float], None] | None]] = []
        self._lock = RLock()

    def add(self, rest: Callable[[], None], seconds: float, end: Callable[[float], None]) -> None:
        """Add a compilation.

        Args:
            end: called with the total seconds, also after a failure.
        """
        self._pending.append((rest, seconds, end))

    def finish(self) -> None:
        """Finish all compilations while other threads wait. Idempotent.

        A part that fails or is interrupted stays pending.
        """
        if not self._pending:  # checked at each call
            return
        with self._lock:
            while self._pending:
                rest, seconds, end = self._pending[0]
                begun = monotonic()
                try:
                    rest()
                except BaseException:
                    self._pending[0] = rest, seconds, None
                    raise
                else:
                    self._pending.pop(0)
                finally:
                    if end is not None:
                        end(seconds + monotonic() - begun)

    @contextmanager
    def finish_on_failure(self) -> Iterator[None]:
        """Return a context that finishes compilations if it ends by an exception."""
        try:
            yield
        except BaseException as error:
            self.finish_after(error)
            raise

    def finish_after(self, failure: BaseException | None) -> None:
        """Finish compilations that may never be called because Dynamo failed after the backend.

        Args:
            failure: exception in flight, which must not be replaced by another one.
        """
        try:
            self.finish()
        except Exception:
            if failure is None:
                raise
            log.warning("Finalizing the failed compilation raised another error.", exc_info=True)


class DeferredKernels:
    """Kernels of lowered subgraphs, as a context that waits for them after an error.

    Other graphs may share the kernels. Inductor waits for the kernels of one graph before it continues. With many
    subgraphs that is most of the lowering time.
    """

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
        """Return a context in which Inductor does not wait for kernels."""
        mine = threading.get_ident()

        def defer(now: Callable[..., None]) -> Callable[..., None]:
            def later(compiler: Any, scope: dict[str, Any]) -> None:
                if threading.get_ident() == mine:
                    self._waits.append(partial(now, compiler, scope))
                else:
                    now(compiler, scope)

            return later

        try:
            with DEFERRED_KERNELS.replace({"AsyncCompile.wait": defer}):
                yield
        finally:
            self.assign_to(None)  # kernels of a subgraph that failed: others may find its code in memory

    def assign_to(self, compiled: Any) -> None:
        """Assign the kernels deferred since the last call to this subgraph."""
        self._subgraphs.append((compiled, self._waits))
        self._waits = []

    def finish(self) -> None:
        """Wait for all kernels and give each subgraph its bundle. Idempotent, also after failures."""
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
    # A result from Inductor's cache may already have kernels.
    kept = getattr(compiled, "_triton_bundle", None)
    if hasattr(compiled, "set_triton_bundle") and not (kept and (kept.kernel_artifacts or kept.static_autotuners)):
        compiled.set_triton_bundle(bundle)


def start_compile_workers(config: CompileConfig, device: torch.device) -> None:
    """Start Inductor's workers and hash Triton's files, without waiting. Idempotent; CPUs need none."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
        Thread(target=_hash_triton, name="lightning_zero-triton", daemon=True).start()


def _hash_triton() -> None:
    with suppress(Exception):  # the compilation reports the error
        triton_key()
