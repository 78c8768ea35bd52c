"""A training that uses every optimization of compilation: ``python -m tests.helpers.active_run``. Prints JSON.

"calls" of replaced functions of torch by name, and the counts of "active" optimizations, in a process of its own, whose
caches are empty.
"""

from __future__ import annotations

import json
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy
from lightning_zero.compat.patches import PATCHES, counted
from lightning_zero.compile.events import OPTIMIZATION_COUNTS

WIDTH, LAYERS = 32, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(L.LightningModule):
    """Equal layers; a counter; a tensor that asks for a gradient in vain, as in transformers' T5."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mask = torch.ones_like(x[..., :1])
        mask.requires_grad = True
        x = self.first(x) * mask
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * (1 + self.calls % 2)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).mean(1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8, 8), torch.randint(0, 4, (48,)))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=ZeroStrategy(activation_memory_budget=0.7), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with counted() as calls:
        trainer.fit(Model(), DataLoader(data, batch_size=4))
    names = [name for patch in PATCHES for name in patch.names]
    print(json.dumps({"calls": {name: calls[name] for name in names}, "active": dict(OPTIMIZATION_COUNTS)}))


if __name__ == "__main__":
    main()
