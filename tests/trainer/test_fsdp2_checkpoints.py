"""Exchange sharded checkpoints with FSDP2, and read FSDP's; loss curves are those of one run.

FSDP2's are those of Lightning's ModelParallelStrategy, and FSDP's those of FSDPStrategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, StateDictType, fully_shard

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    WIDTH,
    Regression,
    close,
    global_losses,
    make_loader,
    make_trainer,
    seeded,
)
from tests.ranks.pool import Ranks

STEPS = 4


class Scheduled(Regression):
    """With a weight that two layers of one group share."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), shared, nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
        shared[2].weight = shared[0].weight

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}
        ]


class Parallel(Scheduled):
    """For ModelParallelStrategy: every layer a group, and the rest one."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def _fit(kind: str, epochs: int, save: str | None = None, path: str | None = None) -> list[float]:
    """The losses, from the checkpoint at ``path`` on."""
    if kind == "fsdp2":
        module: Any = Parallel()
        trainer = make_trainer(
            "ddp", max_epochs=epochs, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        )
    else:
        module = Scheduled()
        trainer = make_trainer(kind, max_epochs=epochs, state_dict_type="sharded")
    if path is not None:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)  # the checkpoint has other values
    trainer.fit(module, make_loader("eager", STEPS), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    losses = global_losses(kind, module)
    close(module)
    return losses


def _uninterrupted() -> list[float]:
    return _fit("eager", 2)


def _both_ways(home: str) -> dict[tuple[str, str], list[float]]:
    found = {}
    for writer in ("eager", "fsdp2"):
        _fit(writer, 1, save=f"{home}/{writer}.ckpt")
    for writer, reader in (("eager", "fsdp2"), ("fsdp2", "eager"), ("eager", "eager"), ("fsdp2", "fsdp2")):
        found[writer, reader] = _fit(reader, 2, path=f"{home}/{writer}.ckpt")
    return found


def test_training_goes_on_under_the_other(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.run(2, _uninterrupted)[0]
    for found in ranks.run(2, _both_ways, str(tmp_path), deadline=120):
        for way, losses in found.items():
            assert_close_relative(losses, wanted[STEPS:], 5 * RTOL, what=f"{way}: ")
    names = {entry.name for entry in (tmp_path / "fsdp2.ckpt").iterdir()}
    assert "manifest.json" not in names, "another one's has no checksums"


def _alone(path: str) -> list[float]:
    return _fit("eager", 2, path=path)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.exhaustive_variants("1")
def test_other_numbers_of_ranks_go_on_from_fsdp2s(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    path = str(tmp_path / "x.ckpt")
    wanted = ranks.run(2, _uninterrupted)[0]
    ranks.run(2, _fit, "fsdp2", 1, path)
    for losses in ranks.run(world_size, _alone, path):
        assert_close_relative(losses, wanted[STEPS:], 5 * RTOL)


def _as_fsdp_strategy_saves(full: str, folder: str) -> None:
    """Write a checkpoint as FSDPStrategy does. FSDPStrategy needs GPUs, but FSDP does not."""
    found = torch.load(full, weights_only=True)
    module = Scheduled()
    module.load_state_dict(found.pop("state_dict"))
    wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    named = wrapped.rekey_optim_state_dict(found.pop("optimizer_states")[0], OptimStateKeyType.PARAM_NAME, wrapped)
    optimizer.load_state_dict(wrapped.optim_state_dict_to_load(wrapped, optimizer, named))
    with wrapped.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state = {"model": wrapped.state_dict(), "optimizer_0": wrapped.optim_state_dict(wrapped, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    torch.save(found, f"{folder}/meta.pt")


def _on_from_fsdp(home: str) -> list[float]:
    trained = make_trainer("eager", max_epochs=1)
    trained.fit(module := Scheduled(), make_loader("eager", STEPS))
    trained.save_checkpoint(f"{home}/full.ckpt")
    close(module)
    _as_fsdp_strategy_saves(f"{home}/full.ckpt", f"{home}/fsdp.ckpt")
    return _fit("eager", 2, path=f"{home}/fsdp.ckpt")


def test_training_goes_on_from_fsdps(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.run(2, _uninterrupted)[0]
    for losses in ranks.run(2, _on_from_fsdp, str(tmp_path)):
        assert_close_relative(losses, wanted[STEPS:], 5 * RTOL)
