"""Where gradients lie by a plan: in memory of their own, or over the copies of weights.

A plan may choose the latter only where each step has one micro-batch for certain. Where another comes all the same,
nobody has asked for what that would be refused for: gradients get memory of their own again.
"""

from __future__ import annotations

import torch

from lightning_zero.compile.steps import CompiledSteps
from lightning_zero.config import EngineConfig
from lightning_zero.config.text import gib
from lightning_zero.sharding.grad_aliasing import forget_gradients
from lightning_zero.sharding.host_policy import used_in
from lightning_zero.sharding.record import Role, ShardedParameter
from lightning_zero.sharding.unsupported import plainly

__all__ = ["PlannedGradients", "has_copy"]


class PlannedGradients:
    """Of one engine.

    Args:
        compiled: has the shards, and what was captured with the gradients where they lay.

    Attributes:
        one_micro_batch: each step has one, for certain; whoever knows says so before a training begins.
    """

    def __init__(self, compiled: CompiledSteps) -> None:
        self._compiled = compiled
        self._session = compiled.session
        self._sharder = compiled.sharder
        self.one_micro_batch = False

    def could_spare(self, config: EngineConfig) -> int:
        """Bytes that they would not take over copies; 0 where they cannot lie there for certain, or by hand do."""
        alone = self._sharder.mesh.host_count == 1 and self.one_micro_batch
        if not (alone and config.may_lie_over_copies) or config.tuning.gradients_over_copies is not None:
            return 0
        return sum(record.shard.nbytes for record in self._trained if has_copy(record, config.compute_dtype))

    def taken(self, over: bool, used: torch.dtype | None) -> int:
        """Bytes that they take. ``used``: the dtype that is computed in; None where that is each weight's own."""
        return sum(record.shard.nbytes for record in self._trained if not (over and has_copy(record, used)))

    @property
    def _trained(self) -> list[ShardedParameter]:
        with plainly():
            return [record for record in self._sharder.live if record.param.requires_grad]

    @property
    def lie_over(self) -> bool:
        """Over copies, by hand or not."""
        return self._sharder.memory.over_copies

    def lie(self, over: bool) -> None:
        """Behind a step: over copies from now on, or not. What steps optimizers looks at them no more."""
        memory = self._sharder.memory
        laid = bool(memory.holds(Role.GRADIENT))
        memory.over_copies = over
        if laid:
            self._compiled.gradients_move()
            memory.gradients = None
            forget_gradients(self._sharder.executor, self._sharder.records)
            memory.allocate_gradients()

    def several_micro_batches(self) -> None:
        """A step has several from now on, whatever was certain. What nobody has asked for is undone, unless gradients
        are wanted that lie where weights are needed: that is refused."""
        with plainly():
            wanted = self.lie_over and any(r.param.grad is not None for r in self._trained if r.grad_over_copy)
        if not wanted:
            self.lie_apart()

    def lie_apart(self) -> None:
        """By hand they may lie over copies, but not by a plan any more. Behind a step."""
        config = self._session.config
        if config.tuning.gradients_over_copies or not (self.one_micro_batch or self.lie_over):
            return
        self.one_micro_batch = False
        spared = self.taken(False, None) - self.taken(True, config.compute_dtype)
        decided = self._session.budget.gradients_apart()
        if decided is None:
            return
        self._session.hold(decided)
        self._session.progress.report(
            f"memory={config.memory!r}: several micro-batches share a step, so gradients have memory of their own "
            f"again, {gib(spared)} GiB. Pass tuning=Tuning(gradients_over_copies=False), so that this is planned for "
            "from the beginning."
        )


def has_copy(record: ShardedParameter, used: torch.dtype | None) -> bool:
    """Whether there is a copy of its shard in ``used``, once weights have copies."""
    return used_in(record.shard.dtype, used) != record.shard.dtype
