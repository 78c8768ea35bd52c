"""CUDA graph capture: set-up, error recovery, memory of a pool, and :class:`GraphedSequence`."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat import cuda


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable automatic garbage collection in this context.

    Keep it short: reference cycles stay until its end.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def configure_nccl_for_capture(device: torch.device) -> None:
    """Make NCCL use the same algorithms in graphs as outside, unless the user has set the variable.

    Ranks that replay must match ranks that run eagerly. By default NCCL registers the memory used in graphs with all
    ranks and uses other channels for it. NCCL reads the variable at the first captured collective.
    """
    if device.type == "cuda":
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the current stream's work into ``graph``; allocate from ``pool``."""
    # Raises pending device errors here: a capture that fails to begin ends the process.
    torch.cuda.synchronize()
    with pause_gc():  # the collector would free graphs and events, which is illegal during capture
        # thread_local, because other threads, such as NCCL's watchdog, continue.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                _end(graph, pool)
            raise
        _end(graph, pool)


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # torch leaves the allocator and the random generator in capture state: other allocations and the next dropout
        # would fail.
        with suppress(RuntimeError):  # already ended
            device = torch.cuda.current_device()
            cuda.end_allocate_to_pool(device, pool)
            cuda.release_pool(device, pool)
        if _is_lost():
            raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is empty")
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
        raise


def _is_lost() -> bool:
    """Return True if no operation on the device can succeed any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return "captur" not in str(error)
    return False


class GraphedSequence:
    """A function that is captured once as a CUDA graph and replayed.

    It runs eagerly ``warmups`` times, then is captured, then replayed. It takes and returns nothing, and reads and
    writes tensors at fixed addresses. On a device without graphs it always runs eagerly.

    Args:
        fn: Launches the kernels; must not synchronize or allocate memory that outlives the call.
        warmups: Eager calls before the capture, to load libraries and compile kernels; inf: always eager.
        watch: Tensors whose addresses must not change; checked at each call.
        pool: Memory pool of the graph, shared with sequences that never run concurrently; None: a pool of its own.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        device: torch.device,
        warmups: float = 1,
        watch: Sequence[Tensor] = (),
        pool: Any = None,
    ) -> None:
        self._fn = fn
        self._pool = pool
        self._device = device
        self._warmups_left = warmups
        self._watch = watch
        self._addresses = [tensor.data_ptr() for tensor in watch]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.replays = 0

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> None:
        moved = [n for n, t in enumerate(self._watch) if t.data_ptr() != self._addresses[n]]
        assert not moved, f"the tensors {moved} of a captured graph have moved"
        if self._device.type != "cuda" or self._warmups_left > 0:
            self._warmups_left -= 1
            self._fn()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        self.replays += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream), capture_graph(graph, self._pool or torch.cuda.graph_pool_handle()):
            self._fn()
        current.wait_stream(stream)
        return graph

    def __repr__(self) -> str:
        state = f"replayed {self.replays} times" if self.captured else "not captured"
        return f"GraphedSequence({state})"
