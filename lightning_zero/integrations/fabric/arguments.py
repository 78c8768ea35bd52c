"""The strategy's arguments: the options, and what Fabric gives every strategy."""

from __future__ import annotations

from typing import ClassVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision

from lightning_zero.config import Options
from lightning_zero.config.schema import options

__all__ = ["Arguments"]


@options
class Arguments(Options):
    """What ``FabricZeroStrategy`` is called with."""

    owner: ClassVar[str] = "FabricZeroStrategy"

    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision: Precision | None = None
