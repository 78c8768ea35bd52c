"""Modules that several tests of the Trainer train: each does in its steps something that users do."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.trainer import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    WIDTH,
    Regression,
    seeded,
)


class Finetuned(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.net
        with seeded():
            self.backbone = nn.Sequential(
                nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN)
            )
            self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.groups: list[list[tuple[float, list[str]]]] = []

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))

    def on_train_batch_start(self, *args: Any) -> None:
        names = {param: name for name, param in self.named_parameters()}
        groups = self.optimizers().param_groups
        self.groups.append([(group["lr"], [names[param] for param in group["params"]]) for group in groups])

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def backbone_later() -> BackboneFinetuning:
    return BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.5, should_align=False)


OVERFLOW = 3  # the step with an infinite gradient


class Wide(Regression):
    """Has one matrix that is large enough for rounded state (`state_dtype`), and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Sequential(nn.Linear(INPUTS, 190), nn.Tanh(), nn.Linear(190, OUTPUTS))


class Overflows(Regression):
    """Attributes: ``overflow`` is the rank, the place in its shard and the value of the gradient that overflows."""

    overflow: tuple[int, int, float] = (0, 0, torch.inf)

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.steps: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    def on_after_backward(self) -> None:
        sharded = engine_of(self) is not None
        if (
            self.trainer.global_step == OVERFLOW
            and len(self.scales) == OVERFLOW
            and (not sharded or dist.get_rank() == self.overflow[0])
        ):
            with no_shard_dispatch():
                next(iter(self.parameters())).grad.view(-1)[self.overflow[1]] = self.overflow[2]

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        state = self.optimizers().optimizer.state
        self.steps.append(float(next(iter(state.values()))["step"]) if state else 0.0)


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


NARROW = 21  # no more than INPUTS


class Parts(Regression):
    def __init__(self) -> None:
        super().__init__()
        with seeded(2):
            self.encoder = nn.Sequential(nn.Linear(INPUTS, NARROW), nn.Tanh(), nn.LayerNorm(NARROW))
            self.decoder = nn.Linear(NARROW, OUTPUTS)
        del self.net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.compute(*batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        raise NotImplementedError


class SeveralForwards(Parts):
    """Two views through forward(), each against the other, as self-supervised methods do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        one, other = self(x), self(x.flip(1))
        with torch.no_grad():
            target = self(x + 1)
        return F.mse_loss(one, y) + F.mse_loss(one, other.detach()) + 0.1 * F.mse_loss(other, target)


class Teacher(Parts):
    """A frozen copy follows the encoder at a distance, and is only called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x + 0.1)
        hidden = self.encoder(x)
        return F.mse_loss(hidden, target) + F.mse_loss(self.decoder(hidden), y)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.3)


class EditsWeights(Parts):
    """Weights are clamped in place where a hook gets hold of them, as critics do."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), y)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.decoder.weight.clamp_(-0.2, 0.2)
        self.encoder[0].weight.data.mul_(0.9)


class Averaged(Regression):
    """A module with a buffer, a tied and a frozen parameter; it records validation."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.tied = nn.Linear(INPUTS, WIDTH)
        self.tied.weight = self.net[0].weight
        self.net[2].weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.steps / 100
        self.log("val_loss", loss, sync_dist=True)
        self.validated.append(loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2, eps=1e-3)
