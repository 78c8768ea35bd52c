"""Modules whose trainings are saved and gone on with, and how they are, by the tests of either kind of checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.trainer import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    WIDTH,
    Regression,
    close,
    global_losses,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)


class Scheduled(Regression):
    """A tied weight, a scalar, a buffer, frozen and unused parameters, hyperparameters; Adam with a schedule."""

    def __init__(self, width: int = WIDTH, note: str = "none", seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="seed")
        with seeded(seed):
            self.net = nn.Sequential(nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, width))
            self.last = nn.Linear(width, OUTPUTS)
            self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.net[2].weight = self.net[1].weight
        self.net[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.net:
            x = torch.tanh(layer(x))
        return self.last(x) * self.scale

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1]},
            {"params": [p for p in self.parameters() if p.ndim < 2]},
        ]
        optimizer = torch.optim.NAdam(groups, lr=1e-2, eps=1e-3)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}
        ]


class PlainSGD(Scheduled):
    """An optimizer without any state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Scheduled):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-3)
        second = torch.optim.SGD([*self.last.parameters(), self.scale], lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.losses.append(loss.item())


MODULES = {cls.__name__: cls for cls in (Scheduled, PlainSGD, TwoOptimizers)}


def resume(kind: str, name: str, paths: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Losses of a second epoch, and the whole state after it, for each of the checkpoints, which hold a first one."""
    out = {}
    for path in paths:
        module = MODULES[name](seed=7)  # other values than the file's
        trainer = make_trainer(kind, max_epochs=2)
        trainer.fit(module, make_loader(kind), ckpt_path=path)
        out[path] = (global_losses(kind, module), whole_state(module))
        assert trainer.global_step == 8
        close(module)
    return out


def uninterrupted_fit(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same for a training on a single device without interruption."""
    module, trainer = MODULES[name](), make_trainer("single", max_epochs=2)
    trainer.fit(module, make_loader("single"))
    return module.losses[4:], whole_state(module)
