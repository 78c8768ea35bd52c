"""Blocks that the ranks train.

They are in a container, so that messages have module paths, and so wide that every rank has a part of every matrix.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, HIDDEN, DEPTH, BATCH = 64, 128, 3, 4
VALIDATION_BATCHES = 2


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        """Called when some weights have been read, and others have not."""
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Net(nn.Module):
    order = tuple(range(DEPTH))  # of the blocks

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(index) for index in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class Numbers(Dataset):
    def __init__(self, batches: int, pause_s: float = 0.0) -> None:
        self.batches, self.pause_s = batches, pause_s

    def __len__(self) -> int:
        return self.batches * BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.pause_s / BATCH)
        return torch.sin(torch.arange(WIDTH) * (index + 1.0))


class Trained(pl.LightningModule):
    """Args: ``late``: build the network in ``configure_model``; ``hooked``.

    Hooks on gradients; ``catches``: a batch for which there is no memory is tried again, half of it.
    """

    scale = 1.0  # of the loss

    def __init__(self, late: bool = False, hooked: bool = False, catches: bool = False) -> None:
        super().__init__()
        self.late, self.hooked, self.catches = late, hooked, catches
        if not late:
            self.net = Net()

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "net"):
            self.net = Net()

    def prepare_data(self) -> None:
        """Called only where it is there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        try:
            loss = self.loss(batch)
        except torch.OutOfMemoryError:
            if not self.catches:
                raise
            loss = self.loss(batch[: BATCH // 2])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self.scale * F.mse_loss(self(batch).float(), batch.float().mean(-1, keepdim=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_fit_start(self) -> None:
        if self.hooked:
            for param in self.parameters():
                param.register_post_accumulate_grad_hook(self.gradient_hook)

    def gradient_hook(self, param: Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loaders(steps: int, world: int, workers: int, pause_s: float) -> tuple[DataLoader, DataLoader]:
    """For training and validation; ``steps`` batches for each of ``world`` ranks."""
    train, validation = Numbers(steps * world, pause_s), Numbers(VALIDATION_BATCHES * world)
    return DataLoader(train, BATCH, num_workers=workers), DataLoader(validation, BATCH)
