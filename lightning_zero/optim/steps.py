"""The part of an engine that steps optimizers over shards: clipping, norms, and what surrounds a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Lane, Phase, Watchdog
from lightning_zero.optim.clip import clip_by_norm, global_norm
from lightning_zero.optim.formulas import rule_for
from lightning_zero.optim.norms import norms_of_each
from lightning_zero.optim.stepper import OptimizerStepper
from lightning_zero.optim.support import check_capture, check_members, check_optimizer, zero_gradients_plainly
from lightning_zero.sharding.refusals import plainly
from lightning_zero.sharding.shard import Sharder

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Protocol: gradients are final -> ``begin_step`` -> the optimizer's own ``step`` -> ``end_step``."""

    config: EngineConfig
    device: torch.device
    executor: Executor
    mesh: Mesh
    sharder: Sharder
    watchdog: Watchdog

    def __init__(self) -> None:
        self._steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerStepper] = weakref.WeakKeyDictionary()

    def before_step(self) -> None:
        """Must come before shards are changed by an optimizer: edits of gathered weights reach them first."""
        raise NotImplementedError

    def stepper(self, optimizer: torch.optim.Optimizer) -> OptimizerStepper:
        """What steps this optimizer over the arenas."""
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            config = self.config
            stepper = OptimizerStepper(
                optimizer, self.sharder, self.mesh.reduce_group, config.capture_step, config.emulate_capture
            )
            self._steppers[optimizer] = stepper
        return stepper

    def begin_step(self, optimizer: torch.optim.Optimizer, skip: Tensor | None = None) -> None:
        """Gradients are final, and the optimizer's own ``step`` is next; :meth:`end_step` must come after it. Inside
        its ``step(closure)``, the closure's last act."""
        self.watchdog.enter(Phase.STEP)
        self.before_step()
        self.stepper(optimizer).begin(skip)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After the optimizer's ``step``, whether it succeeded or not, and before a closure is run again."""
        self.watchdog.enter(Phase.BETWEEN)
        # Only after a step: in the last of several accumulated micro-batches, kept weights are still good.
        if self.stepper(optimizer).end():
            self.executor.expire_shadows()
        self.executor.end_writing()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises :class:`UnsupportedError` when the optimizer needs whole parameters, or holds parameters that are no
        shards."""
        check_optimizer(optimizer)
        if self.config.capture_step is True:
            check_capture(optimizer, self.stepper(optimizer).why_eager)
        check_members(optimizer.param_groups, type(optimizer).__name__, self.sharder.find)
        zero_gradients_plainly(optimizer)

    def arrange(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Lays the shards out for these optimizers, so that each steps its groups as few tensors. Best called before
        training; without it everything works in smaller pieces."""
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        simple = all(rule_for(optimizer, group) is not None for optimizer, group in groups)
        self.sharder.arrange([group["params"] for _, group in groups], by_dimensions=not simple)

    def grad_norm(self, params: Iterable[Tensor]) -> Tensor:
        """2-norm over all ranks' shards of the gradients: a scalar on the device. Collective."""
        with self._waiting_for_norms():
            return global_norm(params, self.mesh.reduce_group, self.device)

    def grad_norms(self, norm_type: float) -> dict[int, Tensor]:
        """The p-norm of each parameter's gradient over all ranks' shards, by the parameter's index: scalars on the
        device, zero where there is no gradient. Collective."""
        live = self.sharder.live
        with plainly():
            shards = [record.param.grad for record in live]
        with self._waiting_for_norms():
            norms = norms_of_each(shards, norm_type, self.mesh.reduce_group, self.device)
        return dict(zip([record.index for record in live], norms, strict=True))

    def clip_grad_norm(self, params: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales gradients to a global norm of at most ``max_norm``; returns the norm before. Collective."""
        with self._waiting_for_norms():
            return clip_by_norm(params, max_norm, self.mesh.reduce_group, self.device)

    def _waiting_for_norms(self) -> AbstractContextManager[None]:
        return self.executor.waiting("norms of gradients", Lane.REDUCE)
