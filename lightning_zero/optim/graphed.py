"""A sequence of kernels that is captured once as a CUDA graph and replayed.

Protocol: ``sequence = GraphedSequence(fn, device)``; ``sequence()`` runs ``fn`` for its side effects, as many times as
``warmups`` says eagerly, then by capturing it, and from then on by replay. ``fn`` takes and returns nothing; it reads
and writes tensors whose memory must stay where it is. On a device without graphs, ``fn`` simply runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.native.capture import capture_graph

__all__ = ["GraphedSequence"]


class GraphedSequence:
    """Kernels that run as one.

    Args:
        fn: launches the kernels; must not synchronise, and must not allocate what outlives it.
        device: where. Anything but CUDA runs ``fn`` each time.
        warmups: calls that run eagerly first, so that libraries are loaded and kernels compiled; inf: all.
        pool: memory pool of another sequence that never runs at the same time, to share memory with.
        watch: tensors whose addresses must not change between capture and replay; checked at each call.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        device: torch.device,
        warmups: float = 1,
        pool: tuple[int, int] | None = None,
        watch: Sequence[Tensor] = (),
    ) -> None:
        self._fn = fn
        self._device = device
        self._left = warmups
        self._pool: Any = pool
        self._watch = watch
        self._addresses = [tensor.data_ptr() for tensor in watch]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.replays = 0

    @property
    def captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> tuple[int, int] | None:
        """For other sequences; None before the capture."""
        return self._pool

    def __call__(self) -> None:
        moved = [n for n, t in enumerate(self._watch) if t.data_ptr() != self._addresses[n]]
        assert not moved, f"the tensors {moved} that a captured graph uses lie elsewhere now"
        if self._device.type != "cuda" or self._left > 0:
            self._left -= 1
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
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        with torch.cuda.stream(stream), capture_graph(graph, pool):
            self._fn()
        self._pool = pool  # one that failed cannot be used again
        current.wait_stream(stream)
        return graph

    def __repr__(self) -> str:
        state = f"replayed {self.replays} times" if self.captured else "not captured"
        return f"GraphedSequence({state})"
