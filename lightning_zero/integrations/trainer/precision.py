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
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.compat.lightning_private import DeviceDtypeModule
from lightning_zero.engine import Engine
from lightning_zero.integrations.trainer.norms import WholeNorms
from lightning_zero.sharding.surgery import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "ZeroDoublePrecision",
    "ZeroHalfPrecision",
    "ZeroMixedPrecision",
    "ZeroPrecision",
    "for_shards",
    "plain",
    "true_dtype",
]


class _ForShards(WholeNorms):
    """What the three plugins share. ``engine`` finds the strategy's engine when it is needed; it does not exist before
    setup."""

    engine: Callable[[], Engine]
    _clips_itself = False

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        # What the user's own hook clips it may look at; otherwise nobody sees gradients before the step that comes now.
        later = self._clips_itself
        self.engine().optimizers.stepper(plain(optimizer)).clip_norm(clip_val, later=later)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self.engine().session.explaining():
            super().backward(*args, **kwargs)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.engine().optimizers.stepper(plain(optimizer)).clip_value(clip_val)

    @override
    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        overridden = (is_overridden(name, model) for name in ("configure_gradient_clipping", "clip_gradients"))
        self._clips_itself = not any(overridden)
        try:
            super()._clip_gradients(model, optimizer, *args, **kwargs)
        finally:
            self._clips_itself = False

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        with self.engine().optimizers.with_closure(plain(optimizer)) as wrap:
            return super().optimizer_step(optimizer, model=model, closure=wrap(closure), **kwargs)

    @override
    def _wrap_closure(self, model: pl.LightningModule, optimizer: Any, closure: Callable[[], Any]) -> Any:
        result = super()._wrap_closure(model, optimizer, closure)
        self.engine().optimizers.begin(plain(optimizer))
        return result


class ZeroPrecision(_ForShards):
    """``32-true``."""


class _OneDtype(_ForShards):
    """Parameters, gradients and everything on the wire in one dtype."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        children = list(module.modules())
        if not any(map(is_sharded, children)):
            return super().convert_module(module)
        # What configure_model() built has this dtype already, and shards must not be replaced.
        dtype = true_dtype(self)
        assert dtype is not None
        for child in children:
            if not is_sharded(child):
                for param in child._parameters.values():
                    if param is not None and param.is_floating_point():
                        param.data = param.data.to(dtype)
                for key, buffer in child._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        child._buffers[key] = buffer.to(dtype)
        if isinstance(module, DeviceDtypeModule):
            module._dtype = dtype
        return module


class ZeroHalfPrecision(_OneDtype, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class ZeroDoublePrecision(_OneDtype, DoublePrecision):
    """``64-true``."""


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


class FlatGradScaler(ShardedGradScaler):
    """A loss scaler that unscales the arenas in a few kernels, and leaves it to the device whether the step is skipped
    where the step allows it."""

    def __init__(self, engine: Callable[[], Engine], device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._engine = engine

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        with self._engine().optimizers.stepper(optimizer).flat():
            super().unscale_(optimizer)

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizers = self._engine().optimizers
        if not self.is_enabled() or not optimizers.stepper(optimizer).may_skip():
            with optimizers.stepping(optimizer):
                return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        device = self._engine().device
        found = torch.stack([value.to(device) for value in state["found_inf_per_device"].values()]).sum()
        with optimizers.stepping(optimizer, skip=found):
            result = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result


def plain(optimizer: Any) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def true_dtype(plugin: Precision) -> torch.dtype | None:
    """The dtype that all floating point parameters have under this plugin; None where they keep their own."""
    if isinstance(plugin, DoublePrecision):
        return torch.float64
    if isinstance(plugin, HalfPrecision):
        return torch.bfloat16 if plugin.precision == "bf16-true" else torch.float16
    return None


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
    elif type(plugin) is DoublePrecision:
        ours = ZeroDoublePrecision()
    elif type(plugin) is MixedPrecision:
        scaler = plugin.scaler
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            if type(scaler) is not torch.amp.GradScaler:
                raise MisconfigurationException(
                    f"The loss scaler {type(scaler).__name__} decides on each rank for itself whether gradients "
                    "overflowed; with sharded "
                    "gradients ranks would disagree. Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
                )
            settings: dict[str, Any] = {"enabled": False}
            if scaler.is_enabled():
                settings = {
                    "init_scale": scaler.get_scale(),
                    "growth_factor": scaler.get_growth_factor(),
                    "backoff_factor": scaler.get_backoff_factor(),
                    "growth_interval": scaler.get_growth_interval(),
                }
            scaler = FlatGradScaler(engine, plugin.device, **settings)
        ours = ZeroMixedPrecision(cast(Any, plugin.precision), plugin.device, scaler)
    else:
        raise MisconfigurationException(
            f"Trainer(precision={plugin.precision!r}) with the plugin {type(plugin).__name__} is not supported by the "
            "ZeRO-3 strategies. "
            "Choose '32-true', 'bf16-mixed', 'bf16-true', '16-mixed', '16-true' or '64-true'."
        )
    ours.engine = engine
    return ours
