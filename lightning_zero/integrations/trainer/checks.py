"""What the strategy looks at before it shards a LightningModule, or uses one that is sharded already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zero.compat.modules import BatchNorm
from lightning_zero.engine import Engine
from lightning_zero.integrations.precision import check_complex, true_dtype

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["check_sharded_module", "check_trainable", "check_callbacks"]


_ALTERNATIVES = {
    StochasticWeightAveraging: (
        "it copies the module once it is sharded. Use lightning.pytorch.callbacks.WeightAveraging or "
        "EMAWeightAveraging in its place, which average shards; for a constant learning rate at the end, add "
        "torch.optim.swa_utils.SWALR as a scheduler."
    ),
    ModelPruning: (
        "it ranks a parameter's elements, and a rank sees only its own, and it replaces parameters by others that no "
        "engine knows. Train without it and prune the plain module that load_from_checkpoint() gives, or prune with "
        "torch.nn.utils.prune in __init__(): weights pruned there train as usual, and stay pruned."
    ),
}


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raises ``MisconfigurationException`` for callbacks that would silently work on shards."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for refused, instead in _ALTERNATIVES.items():
            if isinstance(callback, refused):
                kind, own = refused.__name__, type(callback).__name__
                name = kind if own == kind else f"{own}, a {kind},"
                raise MisconfigurationException(f"{name} is not supported by the ZeRO-3 strategies: {instead}")


def check_trainable(engine: Engine, module: nn.Module) -> None:
    """Raises ``MisconfigurationException`` for a module without parameters."""
    if not engine.sharder.live:
        raise MisconfigurationException(
            f"{type(module).__name__} has no parameters, so there is nothing to train. Use another strategy, or create "
            "the network in __init__() or configure_model()."
        )


def check_sharded_module(
    engine: Engine, module: nn.Module, device: torch.device, precision: Precision, sync_batchnorm: bool
) -> None:
    """Raises ``MisconfigurationException`` when a module sharded earlier does not fit now, or has grown since."""
    world_size = dist.get_world_size()
    if engine.world_size != world_size or engine.device != device:
        raise MisconfigurationException(
            f"The model was sharded by an earlier Trainer over {engine.world_size} ranks on {engine.device}, and "
            f"cannot be used on {world_size} ranks on {device}. Call lightning_zero.unshard(model) in between."
        )
    added = [name for name, param in module.named_parameters() if engine.sharder.find(param) is None]
    if added:
        raise MisconfigurationException(
            f"{len(added)} parameters were added after the model was sharded, the first is {added[0]!r}. If "
            "configure_model() built the network again, make it return early: `if self.model is not None: return`. If "
            "on_load_checkpoint() built it again, call lightning_zero.unshard(model) before this stage. Otherwise add "
            "parameters before fit()."
        )
    check_complex(module, precision.precision)
    dtype = true_dtype(precision.precision)
    others = {param.dtype for param in module.parameters() if param.is_floating_point()} - {dtype}
    if dtype is not None and others:
        raise MisconfigurationException(
            f"The model was sharded by an earlier Trainer in {', '.join(map(str, others))}, and cannot be converted "
            f"for Trainer(precision={precision.precision!r}) any more. Call lightning_zero.unshard(model) in between."
        )
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    if sync_batchnorm and not all(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        raise MisconfigurationException(
            "The model was sharded by an earlier Trainer without sync_batchnorm=True, and its layers cannot be "
            "replaced any more. Call lightning_zero.unshard(model) in between, or pass it to the earlier Trainer, too."
        )
