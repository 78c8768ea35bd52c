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
from lightning_zero.sharding.unsupported import no_shard_dispatch

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout
    from lightning_zero.sharding.shard_tensor import ShardSpec

__all__ = ["Mismatch", "align", "all_gather_shards", "closed_engine_message", "gather_value", "is_shard", "shards_in"]


class Mismatch(Exception):
    """The operands do not fit one shard's layout; callers raise the error that names function and parameter."""


def is_shard(value: Any) -> bool:
    """Return True for a tensor that holds this rank's part of a parameter, or was computed from one elementwise."""
    return isinstance(value, Tensor) and "_zero_spec" in value.__dict__


def shards_in(values: Any) -> Iterator[Tensor]:
    """Yield the shards among these values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from shards_in(value)
        elif is_shard(value):
            yield value


def closed_engine_message(name: str) -> str:
    """Return the message for a shard whose engine is closed."""
    return (
        f"The engine that sharded {name!r} is gone, and with it the other ranks' parts of what is reduced here. Take "
        "norms, sums and the like before the strategy is closed, or of whole values."
    )


def all_gather_shards(own: Tensor, spec: ShardSpec) -> Tensor:
    """All-gather a tensor of one shape and dtype from each rank. Collective.

    Returns:
        Shape [ranks, *own.shape], on the device of ``own``.

    Raises:
        UnsupportedError: the engine is closed.
    """
    if spec.layout.world_size == 1:
        return own[None]
    group = spec.group()
    if group is None:
        raise UnsupportedError(closed_engine_message(spec.name))
    sent = as_real(own.to(spec.device).contiguous())  # gloo has no collectives of complex numbers
    received = torch.empty((spec.layout.world_size, *sent.shape), dtype=sent.dtype, device=sent.device)
    spec.collective(lambda later: dist.all_gather([*received.unbind()], sent, group=group, async_op=later))
    received = received.to(own.device)
    return torch.view_as_complex(received) if own.is_complex() else received


def gather_value(shard: Tensor) -> Tensor:
    """Return the full value of a shard: a plain tensor in the parameter's shape and memory order. Collective."""
    spec: ShardSpec = shard.__dict__["_zero_spec"]
    with no_shard_dispatch(), torch.no_grad():
        # As bytes: gloo has no collectives for some dtypes.
        own = shard.detach().reshape(-1).resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        flat = all_gather_shards(own, spec).view(-1).view(shard.dtype)
        return spec.layout.full_view(flat)


def align(values: list[Any], target: Tensor) -> list[Any]:
    """Return the operands as parts of one layout, that of the shard ``target``; numbers and the like stay.

    Collective if a shard among them is cut in another way.

    Raises:
        Mismatch: an operand does not broadcast to the parameter's shape.
    """
    spec: ShardSpec = target.__dict__["_zero_spec"]
    with no_shard_dispatch():
        flat = target.dim() == 1 and len(spec.layout.shape) > 1
        return [_aligned(value, spec, flat) if isinstance(value, Tensor) else value for value in values]


def _aligned(value: Tensor, spec: ShardSpec, flat: bool) -> Tensor:
    layout = spec.layout
    theirs: ShardSpec | None = value.__dict__.get("_zero_spec")
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
    return _part(full, spec, flat)


def _is_local(value: Tensor, layout: ShardLayout) -> bool:
    """Return True for what has one element for each of the shard's, as an optimizer's state.

    If the last dimension is as long as a shard, such a tensor could also be one to broadcast. Then each rank has one
    row, and both readings agree, unless memory has another order than the dimensions.
    """
    if value.shape != layout.visible_shape and value.shape != (layout.shard_numel,):
        return False
    return layout.order is None or layout.shape[-1] != layout.shard_numel


def _part(full: Tensor, spec: ShardSpec, flat: bool) -> Tensor:
    layout = spec.layout
    try:
        if flat:
            full = full.expand(layout.numel).reshape(layout.shape)
        part = layout.part(full.expand(layout.shape), spec.number)
    except RuntimeError as error:
        raise Mismatch from error
    return part.view(-1) if flat else part
