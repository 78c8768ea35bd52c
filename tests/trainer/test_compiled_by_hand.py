"""Train modules that compile some of their functions as under DDP, or raise an error with the remedy."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, RTOL, Regression, close, seeded, train
from tests.ranks.pool import Ranks


class Functions(Regression):
    """A closure over a part, one part under two names, and a method that is compiled where it is written."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.encoder = nn.Sequential(nn.Linear(INPUTS, 33), nn.Tanh())
            self.middle = nn.Linear(33, 33)
            self.head = nn.Linear(33, OUTPUTS)
        del self.net
        self.fast = torch.compile(self.encoder, backend="eager", fullgraph=True)
        self.rest = torch.compile(lambda x: self.head(self.middle(x)), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fast(x))


class Method(Functions):
    @torch.compile(backend="eager", fullgraph=True)
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(F.linear(self.encoder(x), self.middle.weight)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.losses.append(loss.item())
        return loss


@torch.compile(backend="aot_eager", fullgraph=True)
def error_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x), y)


class Given(Functions):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return error_of(nn.Sequential(self.encoder, self.middle, self.head), *batch)


def _trained(make: Any) -> list[Any]:
    return [train(kind, make) for kind in ("ddp", "eager", "compiled")]


@pytest.mark.parametrize("make", [Functions, Method])
def test_functions_compiled_by_hand_train_as_under_ddp_and_name_values_likewise(ranks: Ranks, make: Any) -> None:
    for (losses, state), *ours in ranks.run(2, _trained, make):
        for own_losses, own_state in ours:
            assert list(own_state) == list(state)
            assert_close_relative(own_losses, losses, RTOL)
            assert_close_relative(own_state, state, 3 * RTOL)


def _refused(kind: str) -> str:
    module = Given()
    try:
        train(kind, lambda: module)
    except (MisconfigurationException, ValueError) as error:
        return str(error)
    finally:
        close(module)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "compiled",
            r"torch.compile\(fullgraph=True\) calls .* \(error_of in .*by_hand.py, line \d+\).* Leave torch.comp",
        ),
        (
            "eager",
            r"shard of encoder.0.weight, .* If a function that you compiled with torch.compile .*do not compile that function",
        ),
    ],
)
def test_functions_that_are_given_modules_are_refused(ranks: Ranks, kind: str, words: str) -> None:
    for said in ranks.run(2, _refused, kind):
        assert re.search(words, said), said
