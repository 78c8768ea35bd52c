"""Stop eager code from keeping unsharded weights until backward.

An eager linear layer saves its weight. These saved-tensor hooks store the weight's record and view instead, and gather
the weight again when backward unpacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.compat.tensors import top_saved_tensors_hooks
from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.saved_tensors import SavedTensor, SavedTensorOffload, VersionedTensor
from lightning_zero.sharding.full_params import gather_full
from lightning_zero.sharding.layout import extent
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder


class _SavedWeight(NamedTuple):
    record: ShardedParameter
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool


def regather_saved_weights(sharder: Sharder, rest: SavedTensorOffload | None = None) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves no gathered weight.

    Args:
        rest: packs all other saved tensors. An in-place change before backward raises the error that torch would raise
            without hooks.
    """
    find = sharder.executor.weights.find_gathered

    # Dynamo runs code that it cannot trace, such as recurrent modules, and would compile functions called from there.
    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor | _SavedWeight | VersionedTensor | SavedTensor:
        with no_shard_dispatch():  # code compiled by the user saves shards
            index = find(tensor)
            index = index if index >= 0 else sharder.reader.find_dequantized(tensor)
        record = sharder.records[index] if index >= 0 else _record_of_cast(tensor, sharder)
        if record is None:
            return VersionedTensor.of(tensor) if rest is None else rest.pack(tensor)
        if record.format is None and not _is_within_weight(tensor, record):
            return tensor.detach()  # otherwise the tensor would be saved by its own grad_fn and keep itself alive
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        with no_shard_dispatch():
            return _SavedWeight(record, record.param._version, tensor.dtype, *view, tensor.is_conj())

    @torch.compiler.disable
    def unpack(saved: Tensor | _SavedWeight | VersionedTensor | SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not isinstance(saved, _SavedWeight):
            return saved.unpack()
        with no_shard_dispatch():
            version = saved.record.param._version
        if version != saved.version:
            raise UnsupportedError(
                f"The weight {saved.record.name!r} was changed between forward and backward (by an optimizer step or "
                "an in-place edit), and "
                "the backward pass needs the old values. Run backward before changing weights."
            )
        view = gather_full(saved.record, saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        return view.conj() if saved.conjugated else view

    return _hooks_outside_of_transforms(pack, unpack)


@contextmanager
def _hooks_outside_of_transforms(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Register saved-tensor hooks that ``torch.func`` can disable.

    It refuses to differentiate while hooks are registered. Inside its transforms autograd keeps the weights.
    """
    graph: Any = torch.autograd.graph
    hooks = graph.saved_tensors_hooks(pack, unpack)
    disable = graph.disable_saved_tensors_hooks  # called first by torch.func

    @contextmanager
    def disable_hooks(message: str) -> Iterator[None]:
        top = top_saved_tensors_hooks(True)
        if top is None or top[0] is not pack:  # no hooks, or a user's above ours
            with disable(message):
                yield
            return
        hooks.__exit__()
        try:
            with disable(message):
                yield
        finally:
            hooks.__enter__()

    graph.disable_saved_tensors_hooks = disable_hooks
    try:
        with hooks:
            yield
    finally:
        graph.disable_saved_tensors_hooks = disable


_VIEWS_AND_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0")


def _record_of_cast(tensor: Tensor, sharder: Sharder) -> ShardedParameter | None:
    """Return the weight of which ``tensor`` is a cast copy; autocast makes one wherever a weight is used."""
    node = tensor.grad_fn
    cast = False
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        cast = cast or node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    shard = getattr(node, "shard", None) if cast else None
    return None if shard is None else sharder.find(shard)


def _is_within_weight(tensor: Tensor, record: ShardedParameter) -> bool:
    """Return True if the view is within the weight's own elements, in order.

    Copies may have other layouts.
    """
    if tensor.is_complex() != record.param.is_complex() or tensor.is_neg():
        return False  # real and imaginary parts
    last = tensor.storage_offset() + extent(tensor.size(), tensor.stride()) - 1
    base = tensor._base if tensor._base is not None else tensor
    whole = base.shape == record.layout.shape and record.layout.permute_to_memory(base).is_contiguous()
    return tensor.numel() > 0 and last < record.layout.numel and (tensor.dtype == record.param.dtype or whole)
