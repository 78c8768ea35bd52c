"""A model of a few large weights, whose bytes stand out above those of an interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.trainer import Regression, make_trainer

__all__ = ["LAYERS", "WEIGHT", "WIDTH", "Few", "fit"]

WIDTH, LAYERS = 1536, 4
WEIGHT = WIDTH * WIDTH * 4  # bytes of one


class Few(Regression):
    """Large weights, each cut as soon as it is built."""

    layers = LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        for _ in range(self.layers - len(self.net)):
            self.net.append(nn.Linear(WIDTH, WIDTH, bias=False))

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def fit(path: str | None = None, steps: int = 1, module: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """One step; from a checkpoint on, which was saved after that, none."""
    module = module or Few()
    trainer = make_trainer("eager", max_steps=steps, max_epochs=-1, **arguments)
    trainer.fit(module, DataLoader(torch.ones(6, WIDTH), batch_size=1), ckpt_path=path)
    assert trainer.global_step == steps
    return module, trainer
