"""Train on two devices as a user's script, and write each rank's observations.

Run by test_launching.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401 - registers the strategies


class Model(pl.LightningModule):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[1][:, 0].tolist()
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        rng = torch.Generator().manual_seed(0)
        y = torch.stack([torch.arange(8.0), torch.ones(8)], 1)
        return DataLoader(TensorDataset(torch.randn(8, 4, generator=rng), y), batch_size=2)


class Write(pl.Callback):
    def __init__(self, home: str) -> None:
        self.home = Path(home)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.write(trainer, module)

    def write(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Model)
        found = {
            "world_size": trainer.world_size,
            "launcher": type(trainer.strategy.launcher).__name__,
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "strategy": type(trainer.strategy).__name__,
            "options": repr(trainer.strategy._options),
            "seen": module.seen,
            "weight": module.net[0].weight.tolist(),
            "held": sum(param.data.numel() for param in module.parameters()),
        }
        (self.home / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def results(home: Path) -> list[dict[str, Any]]:
    """Return the observations of all ranks."""
    return [json.loads(file.read_text()) for file in sorted(home.glob("*.json"))]


def check(ranks: list[dict[str, Any]], environment: str) -> None:
    """Check that two ranks trained one model on different data."""
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["world_size"] == 2
        assert rank["strategy"] == "ZeroStrategy"
        assert rank["launcher"] == "TrainerLauncher"
        assert rank["environment"] == environment
        assert rank["weight"] == ranks[0]["weight"]
    seen = [set(rank["seen"]) for rank in ranks]
    assert seen[0]
    assert not seen[0] & seen[1], "without a distributed sampler every rank trains on the same data"


if __name__ == "__main__":
    home, strategy, devices = sys.argv[1:]
    # a first step is not compiled yet, so nothing ever is
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=strategy,
        limit_train_batches=1 if strategy == "zero3_compile" else 1.0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Write(home)],
    )
    trainer.fit(Model())
