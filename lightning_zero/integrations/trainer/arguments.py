"""The strategy's arguments: the options, and what Lightning gives every strategy."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision

from lightning_zero.config import Options
from lightning_zero.config.schema import options

__all__ = ["Arguments"]


@options
class Arguments(Options):
    """What ``ZeroStrategy`` is called with."""

    accelerator: pl.accelerators.Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
