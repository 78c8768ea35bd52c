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
    """A function that is captured once as a CUDA graph and replayed.

    It runs eagerly ``warmups`` times, then is captured, then replayed. It takes and returns nothing, and reads and
    writes tensors at fixed addresses. On a device without graphs it always runs eagerly.

    Args:
        fn: Launches the kernels; must not synchronize or allocate memory that outlives the call.
        device: Device of the kernels.
        warmups: Eager calls before the capture, to load libraries and compile kernels; inf: always eager.
        pool: Memory pool to share with a sequence that never runs concurrently.
        watch: Tensors whose addresses must not change; checked at each call.
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
        """Memory pool for other sequences; None before the capture."""
        return self._pool

    def __call__(self) -> None:
        moved = [n for n, t in enumerate(self._watch) if t.data_ptr() != self._addresses[n]]
        assert not moved, f"the tensors {moved} of a captured graph have moved"
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
        self._pool = pool  # a pool whose capture failed cannot be used again
        current.wait_stream(stream)
        return graph

    def __repr__(self) -> str:
        state = f"replayed {self.replays} times" if self.captured else "not captured"
        return f"GraphedSequence({state})"
