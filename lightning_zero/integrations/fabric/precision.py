"""Adapt Fabric's precision plugins to sharded parameters: announce each optimizer step to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integrations.precision import ZeroPluginMixin, replace_plugin, to_flat_scaler

FindEngine = Callable[[Optimizer], Engine]


class _ZeroPlugin(ZeroPluginMixin, Precision):
    """Base of our plugins.

    Attributes:
        engine: Returns the engine of an optimizer's parameters.
    """

    engine: FindEngine

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        optimizers = self.engine(optimizer).optimizers
        closure = kwargs.pop("closure", None)
        if closure is None:
            with optimizers.stepping(optimizer):
                return super().optimizer_step(optimizer, **kwargs)
        with optimizers.with_closure(optimizer) as wrap:
            wrapped = wrap(closure)

            def last() -> Any:
                result = wrapped()
                optimizers.begin(optimizer)
                return result

            return super().optimizer_step(optimizer, closure=last, **kwargs)


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
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if "closure" in kwargs:
            raise MisconfigurationException(
                "optimizer.step(closure) cannot be used with a loss scaler (precision='16-mixed'), which must see "
                "gradients before the optimizer does. Run forward and fabric.backward() before optimizer.step()."
            )
        return MixedPrecision.optimizer_step(self, optimizer, **kwargs)  # FlatGradScaler announces the step


def zero_precision(plugin: Precision, engine: FindEngine) -> Precision:
    """Return our counterpart of one of Fabric's precision plugins."""
    ours: _ZeroPlugin = replace_plugin(
        plugin,
        {
            Precision: lambda p: ZeroPrecision(),
            HalfPrecision: lambda p: ZeroHalfPrecision(p.precision),
            DoublePrecision: lambda p: ZeroDoublePrecision(),
            MixedPrecision: lambda p: ZeroMixedPrecision(
                cast(Any, p.precision), p.device, to_flat_scaler(p.scaler, engine, p.device)
            ),
        },
        "Fabric",
    )
    ours.engine = engine
    return ours
