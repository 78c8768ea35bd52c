"""CUDA graph capture: set-up, error recovery, memory of a pool, and :class:`GraphedSequence`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_zero.compat import cuda
from lightning_zero.native.collector import pause_gc

__all__ = ["capture_graph", "configure_nccl_for_capture", "reserve_pool_block"]


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


@contextmanager
def reserve_pool_block(pool: Any, device: torch.device, nbytes: int) -> Iterator[None]:
    """Reserve one free block of ``nbytes`` in ``pool`` for the capture in this context.

    A pool that grows on demand cannot merge neighboring blocks, and memory cannot be freed during a capture: without
    the reserved block the pool takes more memory.
    """
    if not nbytes:
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    cuda.begin_allocate_to_pool(index, pool)
    try:
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=device)
        finally:
            cuda.end_allocate_to_pool(index, pool)
        yield
    finally:
        cuda.release_pool(index, pool)


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
