"""Sharded checkpoints written by one process, for tests that need none of the others."""

from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.sharding.layout import ShardLayout


def sharded(value: torch.Tensor) -> CheckpointShard:
    """Over one rank."""
    layout = ShardLayout.from_shape(value.shape, value.dtype, 1)
    return CheckpointShard(layout, layout.part(value, 0), 0)


def write_folder(path: Path, epoch: int = 3) -> dict[str, Any]:
    """As a Trainer writes it: a tied weight, a buffer, moments. Returns the whole state dict."""
    weights = {"a.weight": torch.randn(7, 5), "b.bias": torch.randn(4).bfloat16()}
    parts = {name: sharded(value) for name, value in weights.items()}
    state = {
        "state_dict": parts | {"tied.weight": parts["a.weight"], "count": torch.tensor(2)},
        "optimizer_0": {
            "state": {"b.bias": {"step": torch.tensor(2.0), "exp_avg": sharded(torch.ones(4))}},
            "param_groups": [{"lr": 0.1, "params": ["b.bias", "a.weight"]}],
        },
    }
    rest = {
        "epoch": epoch,
        "global_step": 12,
        "pytorch-lightning_version": "2.6.6",
        "lr_schedulers": [],
        "loops": {},
        "callbacks": {},
        "hyper_parameters": {"width": 5},
        "mine": [1],
    }
    save_sharded(path, state, rest, SingleProcess())
    return weights | {"tied.weight": weights["a.weight"], "count": torch.tensor(2)}
