"""What the first compilation of a process does whatever it compiles: importing the compiler's parts, making its tables
of ops and patterns, waking the generator of kernels. Done while the C++ executor builds, for which a process waits
anyway.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from threading import Thread

import torch
from torch import Tensor

from lightning_zero.compat.compiler import dynamo_config, maybe_warm_pool, triton_key
from lightning_zero.config import CompileConfig

__all__ = ["start_compile_workers", "warm_up"]


log = logging.getLogger(__name__)


def warm_up(config: CompileConfig, device: torch.device) -> None:
    """Compiles a small function and its derivative. On CPUs without generating code, for which the compilers that build
    the executor are needed."""
    # With compiler collectives ranks compile together, and not all may have come before the executor was built.
    if not config.enabled or dynamo_config.enable_compiler_collectives:
        return
    backend = config.backend if device.type != "cpu" else "aot_eager"
    try:
        with torch.enable_grad():
            x = torch.ones(16, 16, device=device, requires_grad=True)
            torch.compile(_small, backend=backend, dynamic=False)(x).backward()
    except Exception as error:  # what matters will be said when the user's modules are compiled
        log.info("A small function could not be compiled: %s: %s", type(error).__name__, error)


def _small(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x @ x, (16,)).relu().sum()


def start_compile_workers(config: CompileConfig, device: torch.device) -> None:
    """Returns at once. Harmless when repeated. On CPUs Inductor has no use for them."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
        Thread(target=_sum_up, name="lightning_zero-triton", daemon=True).start()


def _sum_up() -> None:
    with suppress(Exception):  # who compiles will hear of it
        triton_key()
