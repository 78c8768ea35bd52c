"""Manual optimization computes what a single device computes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.ranks.pool import Ranks
from tests.trainer.helpers import (
    INPUTS,
    OUTPUTS,
    RTOL,
    WIDTH,
    Regression,
    fitted,
    global_losses,
    is_ours,
    seeded,
    whole_state,
)


class GAN(Regression):
    """Two networks that train each other by turns, each with an optimizer of its own, clipped by hand."""

    def __init__(self, alternate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.alternate = alternate
        with seeded(1):
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
            self.judge = nn.Sequential(nn.Linear(OUTPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
        self.norms: list[float] = []
        self.without_grad: list[bool] = []

    def configure_optimizers(self) -> Any:
        betas = (0.5, 0.99)
        return [
            torch.optim.Adam(self.net.parameters(), lr=1e-2, betas=betas, eps=1e-3),
            torch.optim.Adam(self.judge.parameters(), lr=2e-2, betas=betas, eps=1e-3),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, real = batch
        makes, judges = self.optimizers()
        losses = []
        if not self.alternate or batch_idx % 2 == 0:
            self.toggle_optimizer(makes)
            loss = F.softplus(-self.judge(self.net(x))).mean()
            self.without_grad.append(any(p.requires_grad for p in self.judge.parameters()))
            self._step(makes, loss)
            self.untoggle_optimizer(makes)
            losses.append(loss.item())
        if not self.alternate or batch_idx % 2 == 1:
            self.toggle_optimizer(judges)
            with torch.no_grad():
                fake = self.net(x)
            loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()
            self._step(judges, loss)
            self.untoggle_optimizer(judges)
            losses.append(loss.item())
        self.losses += losses

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class Alternating(GAN):
    def __init__(self) -> None:
        super().__init__(alternate=True)


class Accumulating(Regression):
    """Two backwards a step, a step every second batch, a closure, a scheduler stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.manual_backward(self.net(batch[0] + 1).square().mean() * 0.1)
            self.losses.append(loss.item())
            return loss

        if batch_idx % 2 == 0:
            optimizer.zero_grad()
            closure()
        else:
            optimizer.step(closure=closure)
            self.lr_schedulers().step()


def _train(kind: str, make: Any) -> dict[str, Any]:
    eager = (0,) if make is Accumulating else (0, 1)  # one for each optimizer
    with fitted(kind, make, steps=6, eager=eager) as (module, trainer):
        if is_ours(kind):
            optimizers = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        else:
            optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        return {
            "losses": global_losses(kind, module),
            "state": whole_state(module),
            "optimizers": [o["state"] for o in optimizers if o],
            "steps": trainer.global_step,
            "toggled": getattr(module, "without_grad", None),
            "trainable": [param.requires_grad for param in module.parameters()],
        }


def _train_under(make: Any, *kinds: str) -> dict[str, dict[str, Any]]:
    return {kind: _train(kind, make) for kind in kinds}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("make", [GAN, Alternating, Accumulating], ids=lambda make: make.__name__)
def test_manual_optimization_equals_a_single_device(ranks: Ranks, world_size: int, make: Any) -> None:
    kinds = ("eager", "compiled", "captured") if world_size == 2 else ("eager",)
    results = ranks.run(world_size, _train_under, make, "single", *kinds, deadline=90)
    for rank, result in enumerate(results):
        single = result["single"]
        for kind in kinds:
            ours = result[kind]
            for key in ("losses", "state"):
                assert_close_relative(ours[key], single[key], 2 * RTOL, what=f"{kind} {key} on rank {rank}")
            if rank == 0:
                assert_close_relative(ours["optimizers"], single["optimizers"], 1e-5, what=f"{kind} optimizer state")
            assert ours["steps"] == single["steps"]
            assert ours["toggled"] == single["toggled"]
            assert ours["trainable"] == single["trainable"] == [True] * len(ours["trainable"])
        assert single["toggled"] is None or not any(single["toggled"])
