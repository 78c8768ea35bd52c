"""FSDP2 in CUDA graphs, as in torchtitan: forward and backward of a training step in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import tree_leaves, tree_map_only

__all__ = ["StepGraph"]

RUNS_BEFORE = 3  # warm-up runs on the capture's stream, after which FSDP2 and the allocator allocate nothing new


class StepGraph:
    """Capture ``loss(batch)`` and its backward once, and replay them.

    Gradients keep their memory, so optimizers must set them to zero instead of to None.

    Args:
        loss: returns the loss of a batch, 0-dim, on the device.
    """

    def __init__(self, loss: Callable[[Any], Tensor]) -> None:
        self._loss = loss
        self._runs = 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._out: Tensor | None = None

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of a batch, after its backward."""
        self._runs += 1
        if self._runs <= RUNS_BEFORE:
            return self._run_on_side_stream(batch)
        if self._graph is None:
            self._capture(batch)
        assert self._graph is not None
        assert self._out is not None
        _copy_into(self._batch, batch)
        self._graph.replay()
        return self._out.clone()

    def _run(self, batch: Any) -> Tensor:
        loss = self._loss(batch)
        loss.backward()
        return loss.detach()

    def _run_on_side_stream(self, batch: Any) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Any) -> None:
        torch.cuda.synchronize()
        self._batch = tree_map_only(Tensor, torch.clone, batch)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._out = self._run(self._batch)


def _copy_into(to: Any, batch: Any) -> None:
    old, new = (tree_leaves(tree) for tree in (to, batch))
    for mine, other in zip(old, new, strict=True):
        if isinstance(mine, Tensor):
            if mine.shape != other.shape:
                raise ValueError(
                    f"The batch has a tensor of {tuple(other.shape)} where the graph was captured with "
                    f"{tuple(mine.shape)}: a captured step takes batches of one size."
                )
            mine.copy_(other)
