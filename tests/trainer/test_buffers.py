"""Keep buffers that forward changes equal on all ranks, as under DDP, and the values of a validation."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    Regression,
    close,
    make_loader,
    make_strategy,
    make_trainer,
    seeded,
)
from tests.ranks.pool import Ranks

WIDTH = 64


class Quantiser(nn.Module):
    """Codebook that follows its inputs, edited through ``data`` as in much code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("used", torch.zeros(8, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            hot = F.one_hot(nearest, 8).to(x.dtype)
            target = hot.t() @ x.detach()
            self.codes.data.lerp_(target, 0.2)
            self.used.data.add_(hot.sum(0).long())
        return x + 0.1 * self.codes[nearest]


class Statistics(Regression):
    def __init__(self) -> None:
        super().__init__()
        with seeded(dist.get_rank()):  # how they begin differs, too
            self.register_buffer("mean", torch.randn(INPUTS))
        with seeded():
            quantiser = Quantiser()
            self.net = nn.Sequential(
                nn.Linear(INPUTS, WIDTH, bias=False),
                nn.BatchNorm1d(WIDTH),
                nn.Tanh(),
                quantiser,
                nn.Linear(WIDTH, OUTPUTS),
            )
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("constant", torch.arange(5.0))
        self.validated: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # others make much of noise in small gradients

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)  # another tensor each time
            self.seen |= batch[0].sum() > 0
        loss = F.mse_loss(self(batch[0] - self.mean), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0] - self.mean), batch[1])
        self.validated.append(loss.item())  # this rank's own
        self.log("val_loss", loss, sync_dist=True)


class ByHand(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (batch[0], -batch[0]):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * part.mean(0))
            loss = F.mse_loss(self.net(part), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.item())


def _train(kind: str, make: Any = Statistics, keep: bool = True, **arguments: Any) -> dict[str, Any]:
    module = make()
    if not keep:
        arguments["strategy"] = make_strategy(kind, broadcast_buffers=False)
    trainer = make_trainer(kind, max_epochs=2, **arguments)
    trainer.fit(module, make_loader(kind, 4), make_loader(kind, 2, seed=1))
    out = {
        "losses": module.losses,
        "validated": module.validated,
        "logged": trainer.logged_metrics["val_loss"],
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
    }
    close(module)
    return out


def _train_all(kinds: tuple[str, ...], **arguments: Any) -> list[dict[str, Any]]:
    return [_train(kind, **arguments) for kind in kinds]


def _equal(first: Any, second: Any) -> bool:
    return all(torch.equal(first["buffers"][name], second["buffers"][name]) for name in first["buffers"])


@pytest.mark.parametrize(("world_size", "kind"), [(2, "compiled"), (3, "eager")])
@pytest.mark.exhaustive_variants("3-eager")
def test_each_rank_sees_what_it_sees_under_ddp(ranks: Ranks, world_size: int, kind: str) -> None:
    outs = ranks.run(world_size, _train_all, ("ddp", kind))
    for ddp, *ours in outs:
        for found in ours:
            assert_close_relative(found, ddp, 5 * RTOL, atol=1e-7)
            assert len(found["validated"]) == 4
    for found in zip(*outs, strict=True):
        assert all(_equal(found[0], other) for other in found[1:])
    assert outs[0][0]["losses"] != outs[1][0]["losses"]


def test_accumulated_batches_share_what_was_sent_before_the_first(ranks: Ranks) -> None:
    for ddp, ours in ranks.run(2, _train_all, ("ddp", "eager"), accumulate_grad_batches=2):
        assert_close_relative(ours, ddp, 5 * RTOL, atol=1e-7)


def test_manual_optimization(ranks: Ranks) -> None:
    """Compare over ranks: Lightning's DDP does not broadcast buffers under manual optimization."""
    outs = ranks.run(2, _train_all, ("eager", "compiled"), make=ByHand)
    for first, second in zip(*outs, strict=True):
        assert _equal(first, second)
        assert first["logged"] == second["logged"]
    assert_close_relative(outs[0][1], outs[0][0], 1e-6, atol=1e-7)


def test_switched_off_each_rank_keeps_its_own(ranks: Ranks) -> None:
    (first,), (second,) = ranks.run(2, _train_all, ("eager",), keep=False)
    assert not torch.equal(first["buffers"]["mean"], second["buffers"]["mean"])
