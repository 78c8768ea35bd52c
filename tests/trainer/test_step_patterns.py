"""Call and read anything in a training step, in any order, as on a single device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.lightning_modules import NARROW, EditsWeights, Parts, SeveralForwards, Teacher
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, RTOL, train
from tests.ranks.pool import Ranks


class CallsPartsInAnyOrder(Parts):
    """The decoder before the encoder, one of them twice, one of them not at all."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            return F.mse_loss(self.decoder(x[:, :NARROW]), y)
        if batch_idx % 2:
            prior = self.decoder(torch.ones(len(x), NARROW))
            return F.mse_loss(self.decoder(self.encoder(x)) + 0.1 * prior, y)
        once, again = self.encoder(x), self.encoder(x * 0.5)
        return F.mse_loss(self.decoder(once), y) + F.mse_loss(once, again.detach()) + again.square().mean()


class ReadsWeights(Parts):
    """Weights used by no module: a penalty, a transposed weight, a bias alone."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        hidden = self.encoder(x)
        rebuilt = F.linear(hidden, self.encoder[0].weight.t(), None)
        penalty = self.decoder.weight.norm() + (self.encoder[0].weight @ self.encoder[0].weight.t()).square().mean()
        shapes = [tuple(p.shape) for p in (self.encoder[0].weight, self.decoder.weight, self.decoder.bias)]
        assert shapes == [(NARROW, INPUTS), (OUTPUTS, NARROW), (OUTPUTS,)]
        return F.mse_loss(self.decoder(hidden), y) + F.mse_loss(rebuilt, x) + 0.1 * penalty + self.decoder.bias.sum()


class ReadsOnly(Parts):
    """No module is called at all."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(x @ self.encoder[0].weight.t() + self.encoder[0].bias)
        return F.mse_loss(torch.addmm(self.decoder.bias, hidden, self.decoder.weight.t()), y)


def _train_under(make: Any, *kinds: str) -> dict[str, Any]:
    return {kind: train(kind, make, steps=6) for kind in kinds}


class AssignsData(Parts):
    """Not an edit of the weight's memory, but another memory."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), y)

    def on_train_batch_end(self, *args: Any) -> None:
        self.decoder.weight.data = self.decoder.weight.data.clamp(-0.2, 0.2)


PATTERNS = [CallsPartsInAnyOrder, SeveralForwards, Teacher, ReadsWeights, ReadsOnly, EditsWeights, AssignsData]


@pytest.mark.parametrize(("world_size", "kind"), [(2, "compiled"), (3, "eager")])
@pytest.mark.parametrize("make", PATTERNS, ids=lambda make: make.__name__)
def test_step_equals_a_single_devices(ranks: Ranks, world_size: int, kind: str, make: Any) -> None:
    for rank, result in enumerate(ranks.run(world_size, _train_under, make, "single", kind, deadline=90)):
        assert_close_relative(result[kind], result["single"], 2 * RTOL, what=f"{kind} on rank {rank}")


class PenaltyOverParameters(Parts):
    """self.parameters() holds shards, whose squares and norms are those of parts."""

    def compute(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        penalty = torch.stack([param.norm() for param in self.parameters()]).sum()
        return F.mse_loss(self.decoder(self.encoder(x)), y) + 0.1 * penalty


class AssignsShards(AssignsData):
    def on_train_batch_end(self, *args: Any) -> None:
        for param in self.parameters():
            param.data = param.data.clamp(-0.2, 0.2)


def _try_under(make: Any, *kinds: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in kinds:
        try:
            out[kind] = train(kind, make, steps=3)
        except (RuntimeError, ValueError) as error:
            out[kind] = str(error)
    return out


@pytest.mark.parametrize("make", [AssignsShards, PenaltyOverParameters], ids=lambda make: make.__name__)
def test_what_shards_cannot_do_is_an_error_and_not_another_result(ranks: Ranks, make: Any) -> None:
    for result in ranks.run(2, _try_under, make, "single", "eager"):
        if isinstance(result["eager"], str):
            assert "lightning_zero" in result["eager"], "an error, but not one that says what to do"
        else:
            assert_close_relative(result["eager"], result["single"], 2 * RTOL)
