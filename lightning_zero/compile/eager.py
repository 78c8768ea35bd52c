"""Keeps whole weights from living until backward in code that is not compiled.

An eager linear layer saves its weight. These hooks put in its place a note of which weight and which view, and gather
again when the backward pass asks for it.
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
from lightning_zero.sharding.layout import extent
from lightning_zero.sharding.param_record import ShardedParameter, gather_full
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder

__all__ = ["regather_saved_weights"]


class _Note(NamedTuple):
    record: ShardedParameter
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool


def regather_saved_weights(sharder: Sharder, rest: SavedTensorOffload | None = None) -> AbstractContextManager[Any]:
    """Within the context autograd saves no gathered weight; ``rest`` packs what else it saves, of which an error says
    when it was changed before backward, as torch says it without hooks."""
    find = sharder.executor.weights.find_gathered

    # Dynamo runs code that it cannot trace, as recurrent modules, and would compile what is called from there.
    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor | _Note | VersionedTensor | SavedTensor:
        with no_shard_dispatch():  # what was compiled by hand saves shards
            index = find(tensor)
        record = sharder.records[index] if index >= 0 else _record_of_cast(tensor, sharder)
        if record is None:
            return VersionedTensor.of(tensor) if rest is None else rest.pack(tensor)
        if not _covers(tensor, record):
            return tensor.detach()  # or it would keep itself alive, where it is saved by what has made it
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        with no_shard_dispatch():
            return _Note(record, record.param._version, tensor.dtype, *view, tensor.is_conj())

    @torch.compiler.disable
    def unpack(saved: Tensor | _Note | VersionedTensor | SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not isinstance(saved, _Note):
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

    return _outside_of_transforms(pack, unpack)


@contextmanager
def _outside_of_transforms(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Saved-tensor hooks that let ``torch.func`` do its work: it refuses to differentiate while there are any. Inside
    its transforms weights live as long as autograd needs them."""
    graph: Any = torch.autograd.graph
    hooks = graph.saved_tensors_hooks(pack, unpack)
    disable = graph.disable_saved_tensors_hooks  # what torch.func calls first

    @contextmanager
    def step_aside(message: str) -> Iterator[None]:
        top = top_saved_tensors_hooks(True)
        if top is None or top[0] is not pack:  # none, or a user's on top of ours
            with disable(message):
                yield
            return
        hooks.__exit__()
        try:
            with disable(message):
                yield
        finally:
            hooks.__enter__()

    graph.disable_saved_tensors_hooks = step_aside
    try:
        with hooks:
            yield
    finally:
        graph.disable_saved_tensors_hooks = disable


_VIEWS_AND_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0")


def _record_of_cast(tensor: Tensor, sharder: Sharder) -> ShardedParameter | None:
    """The weight that ``tensor`` is a cast copy of. Autocast casts a weight wherever it is used, and the copy is as
    large as it."""
    node = tensor.grad_fn
    cast = False
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        cast = cast or node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    shard = getattr(node, "shard", None) if cast else None
    return None if shard is None else sharder.find(shard)


def _covers(tensor: Tensor, record: ShardedParameter) -> bool:
    """Whether the saved view lies within the weight's own elements, in their order; a copy may be laid out
    otherwise."""
    if tensor.is_complex() != record.param.is_complex() or tensor.is_neg():
        return False  # real and imaginary parts
    last = tensor.storage_offset() + extent(tensor.size(), tensor.stride()) - 1
    base = tensor._base if tensor._base is not None else tensor
    whole = base.shape == record.layout.shape and record.layout.permute_to_memory(base).is_contiguous()
    return tensor.numel() > 0 and last < record.layout.numel and (tensor.dtype == record.param.dtype or whole)
