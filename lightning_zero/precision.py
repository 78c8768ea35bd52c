"""Lightning's precision plugins, for sharded parameters.

Lightning picks a plugin by the strategy's type and gives ours the ones for whole parameters. :func:`for_shards` puts in
the place of each the same kind of plugin, so that everything that asks for its type still finds it, with three
differences: norms are taken over all ranks, a fused optimizer may be clipped where no scaler is in play, and the
    executor hears of each optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ZeroHalfPrecision", "ZeroMixedPrecision", "ZeroPrecision", "for_shards"]


class _ForShards(Precision):
    """What the three plugins share. ``engine`` finds the strategy's engine when it is needed; it does not exist before
    setup."""

    engine: Callable[[], Engine]

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.engine().clip_grad_norm(self.main_params(optimizer), clip_val)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        def announced() -> Any:
            result = closure()
            # The closure runs forward and backward; the step that follows it changes the shards.
            self.engine().before_step()
            return result

        return super().optimizer_step(optimizer, model=model, closure=announced, **kwargs)


class ZeroPrecision(_ForShards):
    """``32-true``."""


class ZeroHalfPrecision(_ForShards, HalfPrecision):
    """``bf16-true`` and ``16-true``: parameters, gradients and everything on the wire in that dtype."""


class ZeroMixedPrecision(_ForShards, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: parameters in float32, autocast in forward. ``16-mixed`` scales the loss; an
    overflow on any rank skips the step on all."""

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


def for_shards(plugin: Precision, engine: Callable[[], Engine]) -> Precision:
    """Our counterpart of one of Lightning's precision plugins.

    Raises:
        MisconfigurationException: a precision that is not supported, by name.
    """
    ours: _ForShards
    if isinstance(plugin, _ForShards):
        ours = plugin
    elif type(plugin) is Precision:
        ours = ZeroPrecision()
    elif type(plugin) is HalfPrecision:
        ours = ZeroHalfPrecision(plugin.precision)
    elif type(plugin) is MixedPrecision:
        scaler = plugin.scaler
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            if type(scaler) is not torch.amp.GradScaler:
                raise MisconfigurationException(
                    f"The loss scaler {type(scaler).__name__} decides on each rank for itself whether gradients "
                    "overflowed; with sharded "
                    "gradients ranks would disagree. Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
                )
            scaler = ShardedGradScaler(
                plugin.device,
                init_scale=scaler.get_scale(),
                growth_factor=scaler.get_growth_factor(),
                backoff_factor=scaler.get_backoff_factor(),
                growth_interval=scaler.get_growth_interval(),
                enabled=scaler.is_enabled(),
            )
        ours = ZeroMixedPrecision(cast(Any, plugin.precision), plugin.device, scaler)
    else:
        raise MisconfigurationException(
            f"Trainer(precision={plugin.precision!r}) with the plugin {type(plugin).__name__} is not supported by the "
            "ZeRO-3 strategies. "
            "Choose '32-true', 'bf16-mixed', 'bf16-true', '16-mixed' or '16-true'."
        )
    ours.engine = engine
    return ours
