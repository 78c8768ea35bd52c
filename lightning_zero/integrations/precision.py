"""Share precision plugins between the strategies of the Trainer and of Fabric.

:class:`ZeroPluginMixin` keeps the shards when dtypes are converted. :class:`FlatGradScaler` unscales flat buffers and
decides on the device whether a step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.compat.lightning_private import DeviceDtypeModule
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine
from lightning_zero.sharding.module_patching import is_sharded

P = TypeVar("P")

_TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def true_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of all floating point parameters; None if they keep their own."""
    return _TRUE.get(precision)


def with_precision(precision: str, config: EngineConfig) -> EngineConfig:
    """Return the configuration with the dtypes of a precision.

    Raises:
        MisconfigurationException: ``linear_dtype="fp8"``, and the precision computes in 32 or 64 bits.
    """
    if config.linear_dtype == "fp8" and precision in ("32-true", "64-true"):
        raise MisconfigurationException(
            f"linear_dtype='fp8' and precision={precision!r} contradict each other: fp8 products take and return "
            "16-bit numbers. Pass precision='bf16-mixed', or leave linear_dtype out."
        )
    if precision == "16-mixed":
        return replace(config, compute_dtype=torch.float16)
    if precision == "bf16-mixed":
        return replace(config, compute_dtype=torch.bfloat16, reduce_dtype=config.reduce_dtype or "bf16")
    return config


def check_complex(module: nn.Module, precision: str) -> None:
    """Raise ``MisconfigurationException`` for a complex parameter if the precision has no complex dtype."""
    if precision not in ("bf16-true", "16-true", "16-mixed"):
        return
    reason = "torch's loss scaler has no" if precision == "16-mixed" else "its dtype has no"
    for name, param in module.named_parameters():
        if param.is_complex():
            raise MisconfigurationException(
                f"Parameter {name!r} has dtype {param.dtype}, which precision={precision!r} cannot train: {reason} "
                "complex numbers. Choose '32-true' or 'bf16-mixed', or store the parameter as real and imaginary parts "
                "(torch.view_as_real)."
            )


class ZeroPluginMixin:
    """Convert modules without replacing shards. Put it before a precision plugin of Lightning."""

    precision: Any

    def convert_module(self, module: nn.Module) -> nn.Module:
        check_complex(module, self.precision)
        dtype = true_dtype(self.precision)
        if dtype is None or not any(map(is_sharded, module.modules())):
            return super().convert_module(module)  # type: ignore[misc]
        return _convert_unsharded(module, dtype)


def _convert_unsharded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the unsharded parts of a module; its shards were created in this dtype."""
    for child in module.modules():
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


def replace_plugin(plugin: Any, counterparts: Mapping[type, Callable[[Any], P]], api_name: str) -> P:
    """Return our counterpart of one of Lightning's precision plugins; ours stay.

    Args:
        counterparts: Maps types of Lightning to functions that create ours.
    """
    if isinstance(plugin, ZeroPluginMixin):
        return plugin  # type: ignore[return-value]
    make = counterparts.get(type(plugin))
    if make is None:
        raise MisconfigurationException(
            f"{api_name}(precision={plugin.precision!r}) with the plugin {type(plugin).__name__} is not supported by "
            "the ZeRO-3 strategies. Choose '32-true', 'bf16-mixed', 'bf16-true', '16-mixed', '16-true' or '64-true'."
        )
    return make(plugin)


def to_flat_scaler(
    scaler: torch.amp.GradScaler | None, engine: Callable[[Optimizer], Engine], device: str
) -> torch.amp.GradScaler | None:
    """Return our counterpart of a loss scaler, with its settings. A ``ShardedGradScaler`` stays."""
    if scaler is None or isinstance(scaler, ShardedGradScaler):
        return scaler
    if type(scaler) is not torch.amp.GradScaler:
        raise MisconfigurationException(
            f"The loss scaler {type(scaler).__name__} decides on each rank by itself whether gradients overflowed; "
            "with sharded gradients ranks would disagree. Use "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
        )
    settings: dict[str, Any] = {"enabled": False}
    if scaler.is_enabled():
        settings = {
            "init_scale": scaler.get_scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }
    return FlatGradScaler(engine, device, **settings)


class FlatGradScaler(ShardedGradScaler):
    """Unscale flat gradient buffers in a few kernels, and skip steps on the device if possible."""

    def __init__(self, engine: Callable[[Optimizer], Engine], device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._engine = engine

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        stepper = self._engine(optimizer).optimizers.stepper(optimizer)
        with stepper.show_flat_params():
            super().unscale_(optimizer)

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine(optimizer)
        optimizers = engine.optimizers
        if not self.is_enabled() or not optimizers.stepper(optimizer).may_skip():
            with optimizers.stepping(optimizer):
                return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found = torch.stack([value.to(engine.device) for value in state["found_inf_per_device"].values()]).sum()
        with optimizers.stepping(optimizer, skip=found):
            result = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result
