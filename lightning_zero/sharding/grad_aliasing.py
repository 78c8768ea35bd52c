"""Gradients that lie where the compute copies of their weights lay: see csrc/over_copies.h."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor
from lightning_zero.sharding.record import Role, ShardedParameter
from lightning_zero.sharding.unsupported import plainly

__all__ = ["forget_gradients", "lay_over_copies", "refuse_micro_batches"]


def lay_over_copies(executor: Executor, trained: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Gives the gradients of these parameters their copies' memory; returns the parameters that have no copy."""
    others = []
    for record in trained:
        copy = record.memory.get(Role.COMPUTE_COPY)
        if copy is None:
            others.append(record)
            continue
        executor.parameters.set_grad(record.index, copy)
        record.memory[Role.GRADIENT] = copy
        with plainly():
            record.param.grad_dtype = None  # any: otherwise torch takes those of the parameter's own alone
    return others


def forget_gradients(executor: Executor, records: Iterable[ShardedParameter]) -> None:
    """Between steps, when nobody wants the values: takes away all memory that gradients have."""
    for record in records:
        if record.gradient is None:
            continue
        with plainly():
            record.param.grad = record.shown_gradient = None
            if record.grad_over_copy:
                record.param.grad_dtype = record.param.dtype
        del record.memory[Role.GRADIENT]
        executor.parameters.set_grad(record.index, None)


def refuse_micro_batches(over_copies: bool) -> None:
    """Where gradients lie over copies, another micro-batch comes before the step."""
    if over_copies:
        raise UnsupportedError(
            "gradients_over_copies=True is for steps of one micro-batch: the gradients of the first would lie where "
            "the next one's weights are. Leave the option out, or train without accumulate_grad_batches; where "
            "memory=... has chosen it, pass tuning=Tuning(gradients_over_copies=False)."
        )
