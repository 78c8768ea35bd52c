"""Bring the operands of an elementwise function on shards to one layout.

Two parameters of one shape can be cut differently: memory order (channels_last) and dtype decide where a cut falls. A
plain tensor has the shape of the full parameter, or broadcasts to it. Each operand is replaced by the elements that
belong to this rank's part of the target, so that the function gives what it gives on full tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import as_real
from lightning_zero.sharding.unsupported import plainly

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout
    from lightning_zero.sharding.shard_tensor import Sight

__all__ = ["Mismatch", "align", "all_gather_shards", "engine_is_gone", "gather_value", "is_shard", "shards_in"]


class Mismatch(Exception):
    """The operands do not fit one shard's layout; callers raise the error that names function and parameter."""


def is_shard(value: Any) -> bool:
    """Return True for a tensor that holds this rank's part of a parameter, or was computed from one elementwise."""
    return isinstance(value, Tensor) and "_zero_sight" in value.__dict__


def shards_in(values: Any) -> Iterator[Tensor]:
    """Yield the shards among these values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from shards_in(value)
        elif is_shard(value):
            yield value


def engine_is_gone(name: str) -> str:
    """Return the message for a shard whose engine is closed."""
    return (
        f"The engine that sharded {name!r} is gone, and with it the other ranks' parts of what is reduced here. Take "
        "norms, sums and the like before the strategy is closed, or of whole values."
    )


def all_gather_shards(own: Tensor, sight: Sight) -> Tensor:
    """All-gather a tensor of one shape and dtype from each rank. Collective.

    Returns:
        Shape [ranks, *own.shape], on the device of ``own``.

    Raises:
        UnsupportedError: the engine is closed.
    """
    if sight.layout.world_size == 1:
        return own[None]
    group = sight.group()
    if group is None:
        raise UnsupportedError(engine_is_gone(sight.name))
    sent = as_real(own.to(sight.device).contiguous())  # gloo has no collectives of complex numbers
    received = torch.empty((sight.layout.world_size, *sent.shape), dtype=sent.dtype, device=sent.device)
    sight.collective(lambda later: dist.all_gather([*received.unbind()], sent, group=group, async_op=later))
    received = received.to(own.device)
    return torch.view_as_complex(received) if own.is_complex() else received


def gather_value(shard: Tensor) -> Tensor:
    """Return the full value of a shard: a plain tensor in the parameter's shape and memory order. Collective."""
    sight: Sight = shard.__dict__["_zero_sight"]
    with plainly(), torch.no_grad():
        # As bytes: gloo has no collectives for some dtypes.
        own = shard.detach().reshape(-1).resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        flat = all_gather_shards(own, sight).view(-1).view(shard.dtype)
        return sight.layout.whole(flat)


def align(values: list[Any], target: Tensor) -> list[Any]:
    """Return the operands as parts of one layout, that of the shard ``target``; numbers and the like stay.

    Collective if a shard among them is cut in another way.

    Raises:
        Mismatch: an operand does not broadcast to the parameter's shape.
    """
    sight: Sight = target.__dict__["_zero_sight"]
    with plainly():
        flat = target.dim() == 1 and len(sight.layout.shape) > 1
        return [_aligned(value, sight, flat) if isinstance(value, Tensor) else value for value in values]


def _aligned(value: Tensor, sight: Sight, flat: bool) -> Tensor:
    layout = sight.layout
    theirs: Sight | None = value.__dict__.get("_zero_sight")
    if theirs is not None:
        if theirs.layout == layout:
            return value
        full = gather_value(value)
        if flat and full.shape == layout.shape:
            full = full.reshape(-1)
    elif value.numel() == 1 and value.dim() <= max(1, len(layout.shape)) or _is_local(value, layout):
        return value
    else:
        full = value.detach() if value.requires_grad else value
    return _part(full, sight, flat)


def _is_local(value: Tensor, layout: ShardLayout) -> bool:
    """Return True for what has one element for each of the shard's, as an optimizer's state.

    If the last dimension is as long as a shard, such a tensor could also be one to broadcast. Then each rank has one
    row, and both readings agree, unless memory has another order than the dimensions.
    """
    if value.shape != layout.visible_shape and value.shape != (layout.shard_numel,):
        return False
    return layout.order is None or layout.shape[-1] != layout.shard_numel


def _part(full: Tensor, sight: Sight, flat: bool) -> Tensor:
    layout = sight.layout
    try:
        if flat:
            full = full.expand(layout.numel).reshape(layout.shape)
        part = layout.part(full.expand(layout.shape), sight.number)
    except RuntimeError as error:
        raise Mismatch from error
    return part.view(-1) if flat else part
