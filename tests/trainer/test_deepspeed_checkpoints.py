"""Training goes on from checkpoints that DeepSpeed wrote, on another number of ranks, as if it had not been
interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.errors import CheckpointError
from tests.helpers import deepspeed
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, global_losses, make_loader, make_trainer
from tests.ranks.pool import Ranks

STEPS, WRITERS, STAGES = 4, 3, (2, 3)


class Decayed(Regression):
    """Biases are not."""

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim > 1]
        others = [param for param in self.parameters() if param.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _fit(epochs: int, path: str | None = None, save: str | None = None) -> list[float]:
    module, trainer = Decayed(), make_trainer("eager", max_epochs=epochs)
    if path is not None:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)  # the checkpoint has other values
    trainer.fit(module, make_loader("eager", STEPS), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    losses = global_losses("eager", module)
    close(module)
    return losses


def _as_deepspeed_saves(full: Path, folder: Path, stage: int) -> None:
    found = torch.load(full, weights_only=True)
    weights, [optimizer] = found.pop("state_dict"), found.pop("optimizer_states")
    names = [name for name, value in weights.items() if value.ndim > 1]
    names += [name for name, value in weights.items() if value.ndim <= 1]  # as the optimizer numbers them
    groups = [
        group | {"params": {names[number]: weights[names[number]] for number in group["params"]}}
        for group in optimizer["param_groups"]
    ]
    moments = {names[number]: entries for number, entries in optimizer["state"].items()}
    deepspeed.write(folder, stage, WRITERS, groups, moments, {}, found)


def _go_on(home: str) -> tuple[list[float], list[list[float]], str]:
    full, folders = Path(home) / "full.ckpt", [Path(home) / f"stage-{stage}.ckpt" for stage in STAGES]
    _fit(1, save=str(full))
    if dist.get_rank() == 0:
        for stage, folder in zip(STAGES, folders, strict=True):
            _as_deepspeed_saves(full, folder, stage)
    dist.barrier()
    found = [_fit(2, path=str(folder)) for folder in folders]
    dist.barrier()
    if dist.get_rank() == 0:
        (folders[0] / "checkpoint" / f"zero_pp_rank_{WRITERS - 1}_mp_rank_00_optim_states.pt").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        _fit(2, path=str(folders[0]))
    return _fit(2), found, str(caught.value)


def test_training_goes_on_from_deepspeeds(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, found, said in ranks.run(2, _go_on, str(tmp_path)):
        for stage, losses in zip(STAGES, found, strict=True):
            assert_close_relative(losses, wanted[STEPS:], 5 * RTOL, what=f"stage {stage}: ")
        assert f"saved by {WRITERS} ranks, and there are files of {WRITERS - 1}" in said
