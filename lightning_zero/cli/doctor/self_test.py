"""A tiny training on all devices of this machine, in processes of its own, with a deadline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_zero.alone import without_lightning
from lightning_zero.cli.local_ranks import run_ranks

__all__ = ["RANK", "self_test"]

# Ranks train by the engine, which needs no Lightning: it took a quarter of their time to import, in each of them. What
# imports it, the package's __init__, has run in this process, and is left out there.
RUNS = 'import runpy\nrunpy.run_module("lightning_zero.cli.doctor.rank", run_name="__main__", alter_sys=True)'
RANK = ("-c", without_lightning(RUNS))
RANKS_ON_CPU = 2


def self_test(limit_s: float, rank: Sequence[str] = RANK) -> dict[str, Any]:
    """One rank for each GPU, or two on the CPU. The executor must be built: a build would take what time there is.

    Args:
        limit_s: after so many seconds ranks are killed.
        rank: the program of each, which gets the name of the file that rank 0 writes.

    Returns:
        What rank 0 found, with ``seconds`` and ``failed``: why there is nothing, or something wrong, in words.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else RANKS_ON_CPU
    # A user who has pinned devices or threads otherwise may have reasons; on the CPU ranks share the cores.
    environment = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        end = run_ranks([*rank, str(file)], count, limit_s, environment)
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    failed = end.failed
    if not failed and not found:
        failed = "rank 0 ended without a result"
    if not failed and not found["equal"]:
        failed = (
            "sharded training came to other weights or losses than plain training (largest relative difference "
            f"{found['largest_difference']:.2g})"
        )
    return found | {"seconds": round(end.seconds, 1), "failed": failed}
