"""Lightning's precision plugins, for sharded parameters.

Lightning picks a plugin by the strategy's type and gives ours the ones for whole parameters. :func:`zero_precision` puts in
the place of each the same kind of plugin, so that everything that asks for its type still finds it, with three
differences: norms are taken over all ranks, a fused optimizer may be clipped where no scaler is in play, and the
executor hears of each optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integrations.precision import CHOICES, check_complex, to_flat_scaler, convert_unsharded, true_dtype
from lightning_zero.integrations.trainer.norms import GlobalNormPrecision
from lightning_zero.sharding.module_patching import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "ZeroDoublePrecision",
    "ZeroHalfPrecision",
    "ZeroMixedPrecision",
    "ZeroPrecision",
    "zero_precision",
    "unwrap_optimizer",
]


class _ZeroPlugin(GlobalNormPrecision):
    """What the three plugins share. ``engine`` finds the strategy's engine when it is needed; it does not exist before
    setup."""

    engine: Callable[[], Engine]
    _clips_automatically = False

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        # What the user's own hook clips it may look at; otherwise nobody sees gradients before the step that comes now.
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


class _TruePrecision(_ZeroPlugin):
    """Parameters, gradients and everything on the wire in one dtype."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        check_complex(module, self.precision)
        if not any(map(is_sharded, module.modules())):
            return super().convert_module(module)
        dtype = true_dtype(self.precision)
        assert dtype is not None
        return convert_unsharded(module, dtype)


class ZeroHalfPrecision(_TruePrecision, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class ZeroDoublePrecision(_TruePrecision, DoublePrecision):
    """``64-true``."""


class ZeroMixedPrecision(_ZeroPlugin, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: parameters in float32, autocast in forward. ``16-mixed`` scales the loss; an
    overflow on any rank skips the step on all."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        check_complex(module, self.precision)
        return super().convert_module(module)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.scaler is None:
            # A fused optimizer unscales gradients only for a scaler, and there is none.
            Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        else:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # Checkpoints hold the scaler's state under the plugin's name; other strategies look for that of Lightning's own.
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
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def zero_precision(plugin: Precision, engine: Callable[[], Engine]) -> Precision:
    """Our counterpart of one of Lightning's precision plugins.

    Raises:
        MisconfigurationException: a precision that is not supported, by name.
    """
    ours: _ZeroPlugin
    if isinstance(plugin, _ZeroPlugin):
        ours = plugin
    elif type(plugin) is Precision:
        ours = ZeroPrecision()
    elif type(plugin) is HalfPrecision:
        ours = ZeroHalfPrecision(plugin.precision)
    elif type(plugin) is DoublePrecision:
        ours = ZeroDoublePrecision()
    elif type(plugin) is MixedPrecision:
        scaler = to_flat_scaler(plugin.scaler, lambda optimizer: engine(), plugin.device)
        ours = ZeroMixedPrecision(cast(Any, plugin.precision), plugin.device, scaler)
    else:
        raise MisconfigurationException(
            f"Trainer(precision={plugin.precision!r}) with the plugin {type(plugin).__name__} is not supported by the "
            f"ZeRO-3 strategies. {CHOICES}"
        )
    ours.engine = engine
    return ours
