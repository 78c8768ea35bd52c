"""What every capture of a CUDA graph needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_zero.compat import cuda
from lightning_zero.native.collector import pause_gc

__all__ = ["capture_graph", "configure_nccl_for_capture"]


def configure_nccl_for_capture(device: torch.device) -> None:
    """NCCL's collectives are the same in graphs as outside, from now on, unless the user has chosen otherwise: ranks
    that replay must fit together with ranks that run. By default NCCL registers the memory that graphs name, with all
    ranks, and uses other channels for it. It asks for this variable at the first collective that is captured."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What is queued inside, on the current stream, goes to ``graph``, and what is allocated comes from ``pool``."""
    # What has failed on the device is raised here: a graph whose capture fails to begin ends the process.
    torch.cuda.synchronize()
    with pause_gc():  # it would free graphs and events, which this thread may not while it captures
        # Other threads, such as NCCL's watchdog, go on: hence the error mode.
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
        # torch leaves the allocator and the generator of random numbers as if something were still being captured.
        # Nobody could allocate from elsewhere, or get the pool's memory back, and the next dropout would raise.
        with suppress(RuntimeError):  # raised where that was ended
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
    """Whether nothing can be done on the device any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return "captur" not in str(error)
    return False
