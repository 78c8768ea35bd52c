"""Where gradients lie by a plan: in memory of their own, or over the copies of weights.

A plan may choose the latter only where each step has one micro-batch for certain. Where another comes all the same,
nobody has asked for what that would be refused for: gradients get memory of their own again.
"""

from __future__ import annotations

import torch

from lightning_zero.compile.steps import CompiledStepHooks
from lightning_zero.config import EngineConfig
from lightning_zero.config.text import format_gib
from lightning_zero.sharding.flat_memory import compute_dtype_of, free_gradients
from lightning_zero.sharding.param_record import Role, ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch

__all__ = ["GradientPlacement", "has_copy"]


class GradientPlacement:
    """Of one engine.

    Args:
        compiled: has the shards, and what was captured with the gradients where they lay.

    Attributes:
        single_micro_batch: each step has one, for certain; whoever knows says so before a training begins.
    """

    def __init__(self, compiled: CompiledStepHooks) -> None:
        self._compiled = compiled
        self._session = compiled.session
        self._sharder = compiled.sharder
        self.single_micro_batch = False

    def aliasable_bytes(self, config: EngineConfig) -> int:
        """Bytes that they would not take over copies; 0 where they cannot lie there for certain, or by hand do."""
        alone = self._sharder.mesh.host_count == 1 and self.single_micro_batch
        if not (alone and config.may_alias_gradients) or config.tuning.grad_aliasing is not None:
            return 0
        return sum(record.shard.nbytes for record in self._trained if has_copy(record, config.compute_dtype))

    def taken(self, over: bool, used: torch.dtype | None) -> int:
        """Bytes that they take. ``used``: the dtype that is computed in; None where that is each weight's own."""
        return sum(record.shard.nbytes for record in self._trained if not (over and has_copy(record, used)))

    @property
    def _trained(self) -> list[ShardedParameter]:
        with no_shard_dispatch():
            return [record for record in self._sharder.live if record.param.requires_grad]

    @property
    def aliased(self) -> bool:
        """Over copies, by hand or not."""
        return self._sharder.memory.alias_gradients

    def lie(self, over: bool) -> None:
        """Behind a step: over copies from now on, or not. What steps optimizers looks at them no more."""
        memory = self._sharder.memory
        laid = bool(memory.tensors(Role.GRADIENT))
        memory.alias_gradients = over
        if laid:
            self._compiled.on_gradients_moved()
            memory.gradients = None
            free_gradients(self._sharder.executor, self._sharder.records)
            memory.allocate_gradients()

    def on_accumulation(self) -> None:
        """A step has several from now on, whatever was certain. What nobody has asked for is undone, unless gradients
        are wanted that lie where weights are needed: that is refused."""
        with no_shard_dispatch():
            wanted = self.aliased and any(
                r.param.grad is not None for r in self._trained if r.grad_aliases_compute_shard
            )
        if not wanted:
            self.stop_aliasing()

    def stop_aliasing(self) -> None:
        """By hand they may lie over copies, but not by a plan any more. Behind a step."""
        config = self._session.config
        if config.tuning.grad_aliasing or not (self.single_micro_batch or self.aliased):
            return
        self.single_micro_batch = False
        spared = self.taken(False, None) - self.taken(True, config.compute_dtype)
        decided = self._session.budget.gradients_apart()
        if decided is None:
            return
        self._session.apply_update(decided)
        self._session.progress.report(
            f"memory={config.memory!r}: several micro-batches share a step, so gradients have memory of their own "
            f"again, {format_gib(spared)} GiB. Pass tuning=Tuning(grad_aliasing=False), so that this is planned for "
            "from the beginning."
        )


def has_copy(record: ShardedParameter, used: torch.dtype | None) -> bool:
    """Whether there is a copy of its shard in ``used``, once weights have copies."""
    return compute_dtype_of(record.shard.dtype, used) != record.shard.dtype
