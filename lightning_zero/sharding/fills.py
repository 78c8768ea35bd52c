"""Random numbers for shards in sight: each rank draws the whole parameter's and keeps its part.

That gives what a plain module gets from the same generator. Filling the shard alone would give every rank the same
numbers, wherever generators are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.sharding.unsupported import no_shard_dispatch, spec_of

if TYPE_CHECKING:
    from lightning_zero.sharding.shard_tensor import ShardSpec

__all__ = ["IN_PLACE", "LIKE", "draw_like", "fill", "initialise"]

IN_PLACE = frozenset(
    ["normal_", "uniform_", "exponential_", "bernoulli_", "cauchy_", "log_normal_", "geometric_", "random_"]
)
LIKE = frozenset(["randn_like", "rand_like", "randint_like"])


def fill(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``tensor.normal_()`` and its like."""
    shard = args[0]
    spec = spec_of(args)
    with no_shard_dispatch():
        whole = torch.empty(spec.layout.shape, dtype=shard.dtype, device=shard.device)
        func(whole, *args[1:], **kwargs)
        _keep(shard, whole, spec)
    return shard


def draw_like(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``torch.randn_like(tensor)`` and its like."""
    spec = spec_of((*args, *kwargs.values()))
    like = args[0] if args else kwargs["input"]
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    with no_shard_dispatch():
        whole = func(torch.empty(spec.layout.shape, dtype=like.dtype, device=like.device), *args[1:], **rest)
        shard = torch.zeros(like.shape, dtype=whole.dtype, device=whole.device)
        _keep(shard, whole, spec)
        return spec.wrap(shard)


def initialise(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """A function of ``torch.nn.init``, on the whole value."""
    shard = args[0] if args else kwargs["tensor"]
    spec = spec_of([shard])
    rest = {key: value for key, value in kwargs.items() if key != "tensor"}
    with no_shard_dispatch(), torch.no_grad():
        whole = torch.empty(spec.layout.shape, dtype=shard.dtype, device=shard.device)
        func(whole, *args[1:], **rest)
        _keep(shard, whole, spec)
    return shard


def _keep(shard: Tensor, whole: Tensor, spec: ShardSpec) -> None:
    # Where autograd would not allow the fill itself, it must not be done behind its back.
    part = spec.layout.part(whole, spec.number)
    spec.write(shard)
    shard.copy_(part.view(shard.shape))
