"""Compare saves of a Trainer during training, to the bit, with the values at their calls."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine import engine_of
from lightning_zero.integrations.checkpoint_files import read_folder, to_trainer_keys

__all__ = ["NotedSaves"]


class NotedSaves(pl.Callback):
    """Notes all values, then saves, after each of these steps."""

    def __init__(self, home: str, steps: tuple[int, ...]) -> None:
        self.home, self.steps = home, steps
        self.wanted: dict[int, tuple[dict[str, Tensor], Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step in self.steps:
            engine = engine_of(module)
            assert engine is not None
            optimizer = trainer.optimizers[0]
            self.wanted[trainer.global_step] = engine.model_state(), engine.optimizer_state(optimizer)
            trainer.save_checkpoint(self._path(trainer.global_step))

    def _path(self, step: int) -> str:
        return f"{self.home}/{step}.ckpt"

    def compare(self, sharded: bool) -> int:
        """How many of the optimizer's tensors were compared, on rank 0; fails where something is another."""
        compared = 0
        for step, (state, optimizer) in self.wanted.items() if dist.get_rank() == 0 else ():
            path = self._path(step)
            found = to_trainer_keys(read_folder(path, None)) if sharded else torch.load(path)
            model, [saved] = found["state_dict"], found["optimizer_states"]
            assert model.keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(_whole(model[key]), value), (step, key)
            names = [name for group in saved["param_groups"] for name in group["params"]]
            for number, entries in optimizer["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(_whole(saved["state"][names[number]][key]), entries[key]), (step, number, key)
                    compared += 1
        return compared


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
