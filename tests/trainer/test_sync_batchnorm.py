"""Use Trainer(sync_batchnorm=True): statistics over all ranks' batches."""

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
    WIDTH,
    Regression,
    close,
    global_losses,
    is_ours,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def _forward_on_cpu(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """torch's own refuses the CPU. Shares are equal, so means of means are means."""
    if not self.training:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    ranks = dist.get_world_size()
    mean = _Sum.apply(x.mean(0)) / ranks
    var = _Sum.apply((x - mean).square().mean(0)) / ranks
    count = len(x) * ranks
    with torch.no_grad():
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)
        self.num_batches_tracked.add_(1)
    return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class InInit(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        with seeded():
            self.net = nn.Sequential(
                nn.Linear(INPUTS, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)
            )


class InConfigureModel(InInit):
    def __init__(self) -> None:
        Regression.__init__(self)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.build()


class Constant(nn.Linear):
    """Draws nothing, so that it does not matter when it is reset."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))
            if self.bias is not None:
                self.bias.zero_()


class OnMeta(InConfigureModel):
    def build(self) -> None:
        self.net = nn.Sequential(
            Constant(INPUTS, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), Constant(WIDTH, OUTPUTS)
        )

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if torch.distributed.get_world_size() > 1 and self.sharded else "cpu"):
                self.build()

    @property
    def sharded(self) -> bool:
        return "ZeroStrategy" in type(self.trainer.strategy).__name__


def _train(kind: str, make: Any, validate_first: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.SyncBatchNorm, "forward", _forward_on_cpu)
        module = make()
        trainer = make_trainer(kind, max_epochs=2, sync_batchnorm=is_ours(kind))
        if validate_first:
            trainer.validate(module, make_loader(kind, 1), verbose=False)
        trainer.fit(module, make_loader(kind))
        synced = [isinstance(child, nn.SyncBatchNorm) for child in module.net]
        tested = trainer.test(module, make_loader(kind, 2, seed=1), verbose=False)
        out = {"losses": global_losses(kind, module), "state": whole_state(module), "tested": tested}
        close(module)
    return {"values": out, "synced": synced}


def _train_both(*args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train("single", *args), _train("eager", *args)


@pytest.mark.parametrize("validate_first", [False, True], ids=["fit", "validate, fit"])
@pytest.mark.parametrize("make", [InInit, InConfigureModel, OnMeta], ids=lambda make: make.__name__)
def test_statistics_are_those_of_the_global_batch(ranks: Ranks, make: Any, validate_first: bool) -> None:
    for single, ours in ranks.run(2, _train_both, make, validate_first):
        assert ours["synced"] == [False, True, False, False]
        assert not any(single["synced"])
        assert_close_relative(ours["values"], single["values"], 5 * RTOL)
