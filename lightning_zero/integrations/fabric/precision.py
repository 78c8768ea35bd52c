"""Fabric's precision plugins, for sharded parameters: the executor hears of each optimizer step, and what is sharded
already keeps its shards when dtypes are converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integrations.precision import CHOICES, check_complex, to_flat_scaler, convert_unsharded, true_dtype
from lightning_zero.sharding.module_patching import is_sharded

__all__ = ["zero_precision"]

FindEngine = Callable[[Optimizer], Engine]


class _ZeroPlugin(Precision):
    """What all plugins share.

    Attributes:
        engine: finds the engine of an optimizer's parameters.
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
            announced = wrap(closure)

            def last() -> Any:
                result = announced()
                optimizers.begin(optimizer)
                return result

            return super().optimizer_step(optimizer, closure=last, **kwargs)


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
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if "closure" in kwargs:
            raise MisconfigurationException(
                "optimizer.step(closure) cannot be used with a loss scaler (precision='16-mixed'), which must see "
                "gradients before the optimizer does. Run forward and fabric.backward() before optimizer.step()."
            )
        return MixedPrecision.optimizer_step(self, optimizer, **kwargs)  # our scaler announces the step


def zero_precision(plugin: Precision, engine: FindEngine) -> Precision:
    """Our counterpart of one of Fabric's precision plugins.

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
        scaler = to_flat_scaler(plugin.scaler, engine, plugin.device)
        ours = ZeroMixedPrecision(cast(Any, plugin.precision), plugin.device, scaler)
    else:
        raise MisconfigurationException(
            f"Fabric(precision={plugin.precision!r}) with the plugin {type(plugin).__name__} is not supported by the "
            f"ZeRO-3 strategies. {CHOICES}"
        )
    ours.engine = engine
    return ours
