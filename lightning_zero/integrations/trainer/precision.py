"""Adapt the Trainer's precision plugins to sharded parameters.

Lightning selects plugins by the strategy's type and gives ours those for unsharded parameters. :func:`zero_precision`
replaces each by a subclass that takes norms over all ranks, clips fused optimizers if there is no scaler, and announces
each optimizer step to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integrations.precision import ZeroPluginMixin, replace_plugin, to_flat_scaler
from lightning_zero.integrations.trainer.grad_norm import GlobalNormPrecision


class _ZeroPlugin(ZeroPluginMixin, GlobalNormPrecision):
    """Base of our plugins.

    Attributes:
        engine: Returns the strategy's engine, which does not exist before setup.
    """

    engine: Callable[[], Engine]
    _clips_automatically = False

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        # The step that follows scales gradients itself, unless a hook of the user clips and may look at them after.
        later = self._clips_automatically
        self.engine().cycle.finalize_gradients()
        self.engine().optimizers.stepper(unwrap_optimizer(optimizer)).clip_norm(clip_val, later=later)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self.engine().session.explain_errors():
            super().backward(*args, **kwargs)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.engine().cycle.finalize_gradients()
        self.engine().optimizers.stepper(unwrap_optimizer(optimizer)).clip_value(clip_val)

    @override
    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        overridden = (is_overridden(name, model) for name in ("configure_gradient_clipping", "clip_gradients"))
        self._clips_automatically = not any(overridden)
        try:
            super()._clip_gradients(model, optimizer, *args, **kwargs)
        finally:
            self._clips_automatically = False

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        with self.engine().optimizers.with_closure(unwrap_optimizer(optimizer)) as wrap:
            return super().optimizer_step(optimizer, model=model, closure=wrap(closure), **kwargs)

    @override
    def _wrap_closure(self, model: pl.LightningModule, optimizer: Any, closure: Callable[[], Any]) -> Any:
        result = super()._wrap_closure(model, optimizer, closure)
        self.engine().optimizers.begin(unwrap_optimizer(optimizer))
        return result


class ZeroPrecision(_ZeroPlugin):
    """``32-true``."""


class ZeroHalfPrecision(_ZeroPlugin, HalfPrecision):
    """``bf16-true`` and ``16-true``: parameters, gradients and communication in one dtype."""


class ZeroDoublePrecision(_ZeroPlugin, DoublePrecision):
    """``64-true``."""


class ZeroMixedPrecision(_ZeroPlugin, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: float32 parameters and autocast in forward.

    ``16-mixed`` scales the loss; an overflow on any rank skips the step on all.
    """

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.scaler is None:
            # Lightning refuses to clip for fused optimizers, which only matters if they unscale for a scaler.
            Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        else:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # Checkpoints store the scaler's state under the name of Lightning's plugin, which other strategies look for.
    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if MixedPrecision.__qualname__ in checkpoint:
            self.load_state_dict(checkpoint[MixedPrecision.__qualname__])


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def zero_precision(plugin: Precision, engine: Callable[[], Engine]) -> Precision:
    """Return our counterpart of one of Lightning's precision plugins."""
    ours: _ZeroPlugin = replace_plugin(
        plugin,
        {
            Precision: lambda p: ZeroPrecision(),
            HalfPrecision: lambda p: ZeroHalfPrecision(p.precision),
            DoublePrecision: lambda p: ZeroDoublePrecision(),
            MixedPrecision: lambda p: ZeroMixedPrecision(
                cast(Any, p.precision), p.device, to_flat_scaler(p.scaler, lambda optimizer: engine(), p.device)
            ),
        },
        "Trainer",
    )
    ours.engine = engine
    return ours
