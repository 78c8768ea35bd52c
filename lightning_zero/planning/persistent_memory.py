"""Compute the bytes that a rank keeps between steps, as ``sharding/flat_memory.py`` allocates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf

import torch
from torch import Tensor, nn

from lightning_zero.compile.context import small_weight_bytes
from lightning_zero.config import EngineConfig
from lightning_zero.optim.flat_runs import MAX_CHUNK_NUMEL
from lightning_zero.optim.matrix_exchange import UpdateMemory, update_memory
from lightning_zero.optim.reduction_rules import of_parameter, shared_bytes
from lightning_zero.optim.state_dtypes import (
    NO_ROUNDING,
    Rounding,
    StoredDtypes,
    no_bf16_weights_error,
    stored_bytes,
    stored_dtypes,
)
from lightning_zero.optim.update_rules import MatrixRule, begins_by_rule, needs_matrices, rule_for
from lightning_zero.planning.memory_counter import MemoryCounter
from lightning_zero.sharding.flat_memory import compute_dtype_of, is_read_in_place
from lightning_zero.sharding.frozen_weights import FrozenWeights
from lightning_zero.sharding.layout import ShardLayout

MIB = 2**20
SMALL = 64  # elements of a parameter that stands for a shard of any size


@dataclass(frozen=True)
class ParamShard:
    """Layout of one parameter.

    Attributes:
        layout: over the ranks of a shard group.
        dtype: of the master shard.
        trained: the parameter gets gradients.
        keeps_dtype: autocast does not cast it.
        unpacked: elements of the full weight if its frozen values are packed; None for others.
    """

    layout: ShardLayout
    dtype: torch.dtype
    trained: bool
    keeps_dtype: bool
    unpacked: int | None = None

    @property
    def numel(self) -> int:
        """Return the elements of the full parameter; a packed frozen weight has fewer words."""
        return self.layout.numel if self.unpacked is None else self.unpacked

    @property
    def elements(self) -> int:
        """Return the elements of one rank, with padding."""
        return self.layout.shard_numel

    def compute_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype that compiled code reads. ``dtype``: that of autocast."""
        return compute_dtype_of(self.dtype, dtype)


def shard_parameters(
    module: nn.Module,
    world_size: int,
    dtype: torch.dtype | None = None,
    state_blocks: bool = False,
    frozen: FrozenWeights | None = None,
) -> list[ParamShard]:
    """Return the layouts of a module's parameters, each once.

    Args:
        dtype: None for their own.
        state_blocks: see :meth:`ShardLayout.from_shape`.
        frozen: which frozen weights are stored packed; None: none.
    """
    formats = {} if frozen is None else frozen.find(module)
    packed = {
        id(m._parameters[key]): formats[id(m), key]
        for m in module.modules()
        for key in m._parameters
        if (id(m), key) in formats
    }
    embedded = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    found = []
    for param in module.parameters():
        kind = dtype if dtype is not None and param.is_floating_point() else param.dtype
        if (found_format := packed.get(id(param))) is not None:
            layout = ShardLayout.from_shape(torch.Size([found_format.words]), torch.int32, world_size)
            found.append(ParamShard(layout, torch.int32, False, True, param.numel()))
            continue
        keeps_dtype = param.dim() < 2 or id(param) in embedded
        layout = ShardLayout.from_shape(param.shape, kind, world_size, state_blocks=state_blocks)
        found.append(ParamShard(layout, kind, param.requires_grad, keeps_dtype))
    return found


def persistent_bytes(
    shards: Sequence[ParamShard], config: EngineConfig, hosts: int = 1, accumulate: int = 1
) -> dict[str, int]:
    """Return a rank's bytes by the role names of an engine's memory report, without optimizer state."""
    dtype = config.compute_dtype if config.compile else None
    exchange = hosts > 1 and config.tuning.replicate_over is None
    per_host = exchange and config.compile and config.tuning.compute_shard_group == "host"
    host_shards = per_host and all(s.layout.world_size == hosts for s in shards)
    found = {
        "master_shard": sum(s.elements * s.dtype.itemsize for s in shards) - host_master_bytes(shards, config),
        "gradient": sum(s.elements * s.dtype.itemsize for s in shards if s.trained)
        - aliased_gradient_bytes(shards, config),
        "deferred_gradient": 0,
        "compute_shard": 0,
        "full_precision_shard": 0,
        "unsharded_cache": 0 if host_shards else _unsharded_cache_bytes(shards, config),
    }
    for s in shards:
        used = s.compute_dtype(dtype)
        elements = s.elements * (hosts if per_host else 1)
        if used != s.dtype:
            found["compute_shard"] += elements * used.itemsize
        if per_host and (used == s.dtype or s.keeps_dtype):
            found["full_precision_shard"] += elements * s.dtype.itemsize
        if s.trained and accumulate > 1:
            parts = _deferred_shards(s, config, hosts)
            found["deferred_gradient"] += s.elements * parts * torch.promote_types(s.dtype, torch.float32).itemsize
    return found


def aliased_gradient_bytes(shards: Sequence[ParamShard], config: EngineConfig) -> int:
    """Return the bytes that gradients save by aliasing compute copies."""
    return aliasable_gradient_bytes(shards, config) if config.tuning.grad_aliasing else 0


def aliasable_gradient_bytes(shards: Sequence[ParamShard], config: EngineConfig) -> int:
    """Return the bytes of gradients that can alias compute copies."""
    copied = [s for s in shards if s.trained and s.compute_dtype(config.compute_dtype) != s.dtype]
    return sum(s.elements * s.dtype.itemsize for s in copied)


def host_master_bytes(shards: Sequence[ParamShard], config: EngineConfig) -> int:
    """Return the bytes of master weights on the host."""
    away = [s for s in shards if "parameters" in config.offload and not s.keeps_dtype]
    return sum(s.elements * s.dtype.itemsize for s in away if s.compute_dtype(config.compute_dtype) != s.dtype)


def reduce_bucket_bytes(
    shards: Sequence[ParamShard], config: EngineConfig, ranks: int, copied: bool, alone: bool = False
) -> int:
    """Return the bytes of gradients in flight.

    Args:
        ranks: of one host.
        alone: there is no other rank, so nothing is received.
        copied: gradients are copied to symmetric memory of other ranks; otherwise collectives reduce buckets.
    """
    limit = config.tuning.reduce_bucket_mb * MIB
    if copied:
        return int(2 * limit)
    filled: dict[torch.dtype, int] = {}
    largest: dict[torch.dtype, int] = {}
    for s in reversed(shards):  # the order of gradients until the first backward has shown it
        if not s.trained:
            continue
        cast = s.dtype.is_floating_point and config.wire_dtype is not None
        dtype = config.wire_dtype if cast and config.wire_dtype is not None else s.dtype
        most = limit // dtype.itemsize // ranks
        fits = filled.get(dtype, 0) + s.elements <= most
        filled[dtype] = filled.get(dtype, 0) + s.elements if fits else s.elements
        largest[dtype] = max(largest.get(dtype, 0), filled[dtype])
    depth = 2 if config.tuning.reduce_double_buffer else 1
    return sum(depth * (ranks + (not alone)) * elements * dtype.itemsize for dtype, elements in largest.items())


def _deferred_shards(shard: ParamShard, config: EngineConfig, hosts: int) -> int:
    """Return how many ranks' shards of a gradient a rank accumulates before it reduces them."""
    shards = shard.layout.world_size
    if config.stage == 1 and max(shards, hosts) > 1:
        return shards
    if hosts == 1 or config.tuning.cross_host_reduce != "step":
        return 0
    return hosts if config.tuning.replicate_over is None else 1


def _unsharded_cache_bytes(shards: Sequence[ParamShard], config: EngineConfig) -> int:
    """Return the bytes of unsharded weights that are kept until the optimizer steps."""
    left = config.compiled.unsharded_cache_bytes if config.unsharded_cache_until == "step" else 0.0
    small_bytes = 0 if isinf(left) else small_weight_bytes(config.compiled)
    total = 0
    for s in shards:
        used = s.dtype if s.keeps_dtype else s.compute_dtype(config.compute_dtype if config.compile else None)
        full = replace(s.layout, world_size=1).shard_numel * s.layout.world_size * used.itemsize
        fits = s.layout.numel * used.itemsize > small_bytes and full <= left
        if fits and not is_read_in_place(s.layout):
            left -= full
            total += full
    return total


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of a rank's optimizers.

    Attributes:
        states: bytes that persist between steps.
        temporary: bytes that the optimizer's own step takes in addition; 0 if rules make all steps.
        words: bytes per element by name, for instance "exp_avg 4, exp_avg_sq 4".
        updates: full updates of matrices, of all optimizers.
        casts_gradients: an optimizer itself makes a step, and needs gradients in the dtype of the weights.
    """

    states: int
    temporary: int
    words: str
    updates: UpdateMemory = UpdateMemory()
    casts_gradients: bool = False


def measure_optimizer_memory(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[nn.Parameter],
    shards: Sequence[ParamShard],
    rounding: Rounding = NO_ROUNDING,
    matrix_bucket_bytes: int = 1 << 28,
    captured: bool = True,
) -> OptimizerMemory:
    """Step the optimizers on small stand-ins, which replace their parameters, and scale their state.

    Optimizers of matrices are not stepped: their rules name their state.

    Args:
        captured: optimizer steps are captured as CUDA graphs.

    Raises:
        UnsupportedError: weights are to be rounded, and no trained weight is bfloat16.
        Exception: any error of an optimizer's step.
    """
    trained = {shard.dtype for shard in shards if shard.trained}
    if rounding.weights and not any(map(rounding.rounds_weights, trained)):
        raise no_bf16_weights_error(trained)
    of = {id(param): shard for param, shard in zip(params, shards, strict=True)}
    states = temporary = 0
    casts_gradients = False
    words: dict[str, float] = {}
    updates: list[UpdateMemory] = []
    for optimizer in optimizers:
        if needs_matrices(optimizer):
            states += _matrix_states(optimizer, of, rounding, words)
            updates.append(_update_memory(optimizer, of, matrix_bucket_bytes))
            continue
        shard_of: dict[Tensor, ParamShard] = {}
        for group in optimizer.param_groups:
            chosen = [of[id(param)] for param in group["params"] if of[id(param)].trained]
            group["params"] = [_small_parameter(shard) for shard in chosen]
            shard_of.update(zip(group["params"], chosen, strict=True))
        counter = MemoryCounter(shard_of)
        with counter:
            optimizer.step()
        per_byte = (counter.peak - counter.alive) / max(sum(param.nbytes for param in shard_of), 1)
        stepped = sum(shard.elements * shard.dtype.itemsize for shard in of.values())
        if rounding.state_dtype is not None:  # the step then runs in chunks
            stepped = min(stepped, MAX_CHUNK_NUMEL * torch.float32.itemsize)
        rules = [rule_for(optimizer, group) for group in optimizer.param_groups]
        if not (all(map(begins_by_rule, rules)) and (captured or any(rounding))):
            temporary, casts_gradients = max(temporary, int(per_byte * stepped)), True
        stored = _stored_dtypes(optimizer, shard_of, rounding)
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    alike = value.shape == param.shape
                    dtype = stored.get(param, {}).get(name, value.dtype) if alike else value.dtype
                    size = stored_bytes(dtype)
                    states += int(size * (shard_of[param].elements if alike else value.numel()))
                    words |= {name: min(size, words.get(name, size))} if alike else {}
    text = ", ".join(f"{name} {size:.3g}" for name, size in words.items()) or "nothing"
    total = UpdateMemory(sum(one.buffers for one in updates), sum(one.workspace for one in updates))
    return OptimizerMemory(states, temporary, text, total, casts_gradients)


def _matrix_states(
    optimizer: torch.optim.Optimizer, of: dict[int, ParamShard], rounding: Rounding, words: dict[str, float]
) -> int:
    """Return the bytes of state of an optimizer of matrices, and add to the bytes per element by name."""
    total = 0
    for group in optimizer.param_groups:
        any_rule = rule_for(optimizer, group)
        for shard in (of[id(param)] for param in group["params"]):
            if any_rule is None or not shard.trained:
                continue
            rule = of_parameter(any_rule, shard.layout.shape, shard.dtype)
            stored = stored_dtypes(rule, shard.layout, shard.dtype, rounding)
            sizes = {name: stored_bytes(stored.get(name, shard.dtype)) for name in rule.state}
            total += int(sum(sizes.values()) * shard.elements) + shared_bytes(rule, shard.layout.shape, shard.dtype)
            words.update({name: min(size, words.get(name, size)) for name, size in sizes.items()})
    return total


def _update_memory(optimizer: torch.optim.Optimizer, of: dict[int, ParamShard], max_bytes: int) -> UpdateMemory:
    members = []
    for group in optimizer.param_groups:
        rule = rule_for(optimizer, group)
        shards = [of[id(param)] for param in group["params"]]
        if isinstance(rule, MatrixRule):
            members.append((rule, [shard.layout for shard in shards if shard.trained]))
    ranks = next(iter(of.values())).layout.world_size
    return update_memory(members, ranks, max_bytes)


def _stored_dtypes(
    optimizer: torch.optim.Optimizer, shard_of: dict[Tensor, ParamShard], rounding: Rounding
) -> dict[Tensor, StoredDtypes]:
    return {
        param: stored_dtypes(rule_for(optimizer, group), shard_of[param].layout, shard_of[param].dtype, rounding)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _small_parameter(shard: ParamShard) -> nn.Parameter:
    """Return a parameter with as many dimensions as the full one."""
    shape = (1,) * (len(shard.layout.shape) - 1) + (SMALL,)
    param = nn.Parameter(torch.zeros(shape, dtype=shard.dtype))
    param.grad = torch.zeros_like(param)
    return param
