"""Bytes that stay on a rank from step to step, by what they are for. Pure arithmetic, and the same that the engine's
own memory comes to (``sharding/flat_memory.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf

import torch
from torch import nn

from lightning_zero.compile.context import small_weight_bytes
from lightning_zero.config import EngineConfig
from lightning_zero.sharding.flat_memory import compute_dtype_of
from lightning_zero.sharding.layout import ShardLayout

__all__ = ["ParamShard", "cut", "masters_away", "may_lie_over_copies", "persistent_bytes", "over_copies"]


@dataclass(frozen=True)
class ParamShard:
    """One parameter, and how it is cut.

    Attributes:
        layout: over the ranks that hold the model together.
        dtype: of its master shard.
        trained: it gets gradients.
        stays_full_precision: autocast leaves it in its own dtype.
    """

    layout: ShardLayout
    dtype: torch.dtype
    trained: bool
    stays_full_precision: bool

    @property
    def elements(self) -> int:
        """Of a rank, padding included."""
        return self.layout.shard_numel

    def compute_dtype_of(self, dtype: torch.dtype | None) -> torch.dtype:
        """In which dtype compiled code uses it, where wider ones are computed in ``dtype``."""
        return compute_dtype_of(self.dtype, dtype)


def cut(module: nn.Module, world_size: int, dtype: torch.dtype | None = None) -> list[ParamShard]:
    """All parameters of a module, each once; ``dtype``: that precision gives floating point ones, None for their
    own."""
    embedded = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    found = []
    for param in module.parameters():
        kind = dtype if dtype is not None and param.is_floating_point() else param.dtype
        wide = param.dim() < 2 or id(param) in embedded
        found.append(ParamShard(ShardLayout.from_shape(param.shape, kind, world_size), kind, param.requires_grad, wide))
    return found


def persistent_bytes(
    cuts: Sequence[ParamShard], config: EngineConfig, hosts: int = 1, accumulate: int = 1
) -> dict[str, int]:
    """Bytes of a rank, by the names under which an engine reports them; what the optimizer keeps is not among them.

    Args:
        hosts: over which the ranks lie.
        accumulate: micro-batches in one step of the optimizer.
    """
    computed = config.compute_dtype if config.compile else None
    exchange = hosts > 1 and config.tuning.replicate_over is None
    several = exchange and config.compile and config.tuning.compute_shard_group == "host"
    found = {
        "master_shard": sum(c.elements * c.dtype.itemsize for c in cuts) - masters_away(cuts, config),
        "gradient": sum(c.elements * c.dtype.itemsize for c in cuts if c.trained) - over_copies(cuts, config),
        "deferred_gradient": 0,
        "compute_copy": 0,
        "full_precision_copy": 0,
        "resident_weight": 0
        if several and all(c.layout.world_size == hosts for c in cuts)
        else _resident(cuts, config),
    }
    for c in cuts:
        used = c.compute_dtype_of(computed)
        share = c.elements * (hosts if several else 1)
        if used != c.dtype:
            found["compute_copy"] += share * used.itemsize
        if several and (used == c.dtype or c.stays_full_precision):
            found["full_precision_copy"] += share * c.dtype.itemsize
        if c.trained and accumulate > 1:
            parts = _parts_that_wait(c, config, hosts)
            found["deferred_gradient"] += c.elements * parts * torch.promote_types(c.dtype, torch.float32).itemsize
    return found


def over_copies(cuts: Sequence[ParamShard], config: EngineConfig) -> int:
    """Bytes that gradients would take, and do not, since they lie over compute copies."""
    return may_lie_over_copies(cuts, config) if config.tuning.grad_aliasing else 0


def may_lie_over_copies(cuts: Sequence[ParamShard], config: EngineConfig) -> int:
    """Bytes that gradients take which could lie over compute copies."""
    copied = [c for c in cuts if c.trained and c.compute_dtype_of(config.compute_dtype) != c.dtype]
    return sum(c.elements * c.dtype.itemsize for c in copied)


def masters_away(cuts: Sequence[ParamShard], config: EngineConfig) -> int:
    """Bytes of master shards that lie on the host."""
    away = [c for c in cuts if "parameters" in config.offload and not c.stays_full_precision]
    return sum(c.elements * c.dtype.itemsize for c in away if c.compute_dtype_of(config.compute_dtype) != c.dtype)


def _parts_that_wait(cut: ParamShard, config: EngineConfig, hosts: int) -> int:
    """Of a parameter's gradient: so many shards' are added up on a rank before they are reduced."""
    shards = cut.layout.world_size
    if config.stage == 1 and max(shards, hosts) > 1:
        return shards
    if hosts == 1 or config.tuning.cross_host_reduce != "step":
        return 0
    return hosts if config.tuning.replicate_over is None else 1


def _resident(cuts: Sequence[ParamShard], config: EngineConfig) -> int:
    """Whole weights that stay until the optimizer steps."""
    left = config.compiled.unsharded_cache_bytes if config.unsharded_cache_until == "step" else 0.0
    small_bytes = 0 if isinf(left) else small_weight_bytes(config.compiled)
    total = 0
    for c in cuts:
        used = (
            c.dtype if c.stays_full_precision else c.compute_dtype_of(config.compute_dtype if config.compile else None)
        )
        whole = replace(c.layout, world_size=1).shard_numel * c.layout.world_size * used.itemsize
        if c.layout.numel * used.itemsize > small_bytes and whole <= left:
            left -= whole
            total += whole
    return total
