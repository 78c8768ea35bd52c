"""Whether each step of a training has one micro-batch, for certain: what a plan may then do with gradients is refused
otherwise, and must not end a training that nobody has asked that of."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["one_micro_batch"]

# Hooks in which users add gradients up, or call backward as often as they like.
MANUAL_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad")


def one_micro_batch(trainer: pl.Trainer) -> bool:
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        module.automatic_optimization
        and trainer.accumulate_grad_batches == 1
        and not any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        and not any(is_overridden(name, module, pl.LightningModule) for name in MANUAL_HOOKS)
    )
