"""What Inductor needs seconds for, begun before there is anything to compile: the processes in which it compiles
kernels, until which it would compile them one by one in this process, and a sum of Triton's files, without which it
finds nothing in its caches."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import torch

from lightning_zero.compat.compiler import maybe_warm_pool, triton_key
from lightning_zero.config import CompileConfig

__all__ = ["start_compile_workers"]


def start_compile_workers(config: CompileConfig, device: torch.device) -> None:
    """Returns at once. Harmless when repeated. On CPUs Inductor has no use for them."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
        Thread(target=_sum_up, name="lightning_zero-triton", daemon=True).start()


def _sum_up() -> None:
    with suppress(Exception):  # who compiles will hear of it
        triton_key()
