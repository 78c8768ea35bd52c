"""Start work that every compilation of a process needs while the C++ executor is built.

It imports compiler modules, builds tables of ops and patterns, starts Inductor's worker processes, and hashes Triton's
files for cache keys.
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
    """Compile a small function and its derivative.

    On CPUs no code is generated, since the compilers are building the executor.
    """
    # With compiler collectives ranks compile together, and some may not have arrived yet.
    if not config.enabled or dynamo_config.enable_compiler_collectives:
        return
    backend = config.backend if device.type != "cpu" else "aot_eager"
    try:
        with torch.enable_grad():
            x = torch.ones(16, 16, device=device, requires_grad=True)
            torch.compile(_small, backend=backend, dynamic=False)(x).backward()
    except Exception as error:  # a later compilation of the user's modules reports the error
        log.info("Compiler warm-up failed: %s: %s", type(error).__name__, error)


def _small(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x @ x, (16,)).relu().sum()


def start_compile_workers(config: CompileConfig, device: torch.device) -> None:
    """Start compile workers and return at once. Idempotent; CPUs need none."""
    if config.enabled and config.backend == "inductor" and device.type != "cpu":
        maybe_warm_pool()
        Thread(target=_sum_up, name="lightning_zero-triton", daemon=True).start()


def _sum_up() -> None:
    with suppress(Exception):  # the compilation reports the error
        triton_key()
