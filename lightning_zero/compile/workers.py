"""The processes in which Inductor compiles kernels, started before there is anything to compile: they need seconds to
come up, and until they are there it compiles kernels one by one in this process."""

from __future__ import annotations

import torch

from lightning_zero.compat.compiler import maybe_warm_pool
from lightning_zero.config import CompileConfig

__all__ = ["start_workers"]


def start_workers(config: CompileConfig, device: torch.device) -> None:
    """Returns at once. Harmless when repeated. On CPUs Inductor has no use for them."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
