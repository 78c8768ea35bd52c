"""Keeps whole weights from living until backward in code that is not compiled.

An eager linear layer saves its weight. These hooks put in its place a note of which weight and which view, and gather
again when the backward pass asks for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.full import gather_full
from lightning_zero.sharding.shard import ShardedParameter, Sharder

__all__ = ["regather_saved_weights"]


class _Note(NamedTuple):
    record: ShardedParameter
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def regather_saved_weights(sharder: Sharder) -> AbstractContextManager[Any]:
    """Within the context autograd saves no gathered weight."""
    find = sharder.executor.find_gathered

    def pack(tensor: Tensor) -> Tensor | _Note:
        index = find(tensor)
        if index < 0:
            return tensor
        record = sharder.at(index)
        if tensor.dtype != record.param.dtype:
            return tensor
        return _Note(record, record.param._version, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.record.param._version != saved.version:
            raise UnsupportedError(
                f"The weight {saved.record.name!r} was changed between forward and backward (by an optimizer step or "
                "an in-place edit), and "
                "the backward pass needs the old values. Run backward before changing weights."
            )
        return gather_full(saved.record).as_strided(saved.size, saved.stride, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
