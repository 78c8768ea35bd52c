"""LightningCLI: module, data, Trainer and strategy from a YAML file.

python examples/cli.py fit --config examples/cli.yaml
python examples/cli.py fit --config examples/cli.yaml --trainer.strategy.init_args.tuning.unsharded_cache_mb 100
"""

from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self, width: int = 256, depth: int = 4, rate: float = 1e-3) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(16, width), *layers, nn.Linear(width, 1))
        self.rate = rate

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


class Waves(L.LightningDataModule):
    def __init__(self, count: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        x = torch.randn(count, 16)
        self.data, self.batch_size = TensorDataset(x, x.sin().sum(-1)), batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    return LightningCLI(Regression, Waves, args=arguments, save_config_callback=None)


if __name__ == "__main__":
    main()
