"""Start Inductor's worker processes, and hash Triton's files, before the first compilation."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import torch

from lightning_zero.compat.compiler import maybe_warm_pool, triton_key
from lightning_zero.config import CompileConfig


def start_compile_workers(config: CompileConfig, device: torch.device) -> None:
    """Start compile workers and return at once. Idempotent; CPUs need none."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
        Thread(target=_sum_up, name="lightning_zero-triton", daemon=True).start()


def _sum_up() -> None:
    with suppress(Exception):  # the compilation reports the error
        triton_key()
