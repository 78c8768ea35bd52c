"""Gradients that lie where the compute copies of their weights lay: see csrc/gradients/grad_aliasing.h."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor
from lightning_zero.sharding.record import Role, ShardedParameter
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["forget_gradients", "alias_compute_shards", "check_single_micro_batch"]


def alias_compute_shards(executor: Executor, trained: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Gives the gradients of these parameters their copies' memory; returns the parameters that have no copy."""
    others = []
    for record in trained:
        copy = record.memory.get(Role.COMPUTE_SHARD)
        if copy is None:
            others.append(record)
            continue
        executor.parameters.set_grad(record.index, copy)
        record.memory[Role.GRADIENT] = copy
        with no_shard_dispatch():
            record.param.grad_dtype = None  # any: otherwise torch takes those of the parameter's own alone
    return others


def forget_gradients(executor: Executor, records: Iterable[ShardedParameter]) -> None:
    """Between steps, when nobody wants the values: takes away all memory that gradients have."""
    for record in records:
        if record.gradient is None:
            continue
        with no_shard_dispatch():
            record.param.grad = record.visible_grad = None
            if record.grad_aliases_compute_shard:
                record.param.grad_dtype = record.param.dtype
        del record.memory[Role.GRADIENT]
        executor.parameters.set_grad(record.index, None)


def check_single_micro_batch(over_copies: bool) -> None:
    """Where gradients lie over copies, another micro-batch comes before the step."""
    if over_copies:
        raise UnsupportedError(
            "grad_aliasing=True is for steps of one micro-batch: the gradients of the first would lie where "
            "the next one's weights are. Leave the option out, or train without accumulate_grad_batches; where "
            "memory=... has chosen it, pass tuning=Tuning(grad_aliasing=False)."
        )
