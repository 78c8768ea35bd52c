"""Test the lines about a compilation: its module and its reason."""

import re

import pytest
import torch
from torch import nn

from tests.helpers.trainer import INPUTS, OUTPUTS, Regression, fitted, make_loader
from tests.ranks.pool import Ranks

WIDTH = 64


class Parts(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def _lines(make: type[Regression], beginning: str = "Compiling") -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_zero.integrations.trainer.strategy.rank_zero_info", said.append)
        with fitted("compiled", make, 2) as (module, trainer):
            trainer.validate(module, make_loader("compiled", 1), verbose=False)
    return [line for line in said if line.startswith(beginning)]


def test_they_name_the_module_and_the_purpose(ranks: Ranks) -> None:
    for lines in ranks.run(2, _lines, Parts):
        what = "'net' (Sequential) for {} (a graph of 4 weights, '0.weight' to '2.bias'); this step takes longer."
        assert lines == [
            f"Compiling {what.format(purpose)}" for purpose in ("training, forward and backward", "evaluation")
        ]
    for lines in ranks.run(2, _lines, Regression):
        assert lines[0].startswith(
            "Compiling the whole Regression for training, forward and backward (a graph of 6 weights, 'net.0.weight'"
        )


def test_one_line_says_where_the_start_went(ranks: Ranks) -> None:
    for lines in ranks.run(2, _lines, Regression, "Start"):
        [line] = lines  # at the end of so short a training; the evaluation after it says nothing
        assert " s to the end of step 2: build 0.0, until the first step " in line
        seconds = dict(re.findall(r"(Dynamo|joint graph|aot_eager|first step, eagerly) ([0-9.]+)", line))
        assert len(seconds) == 4
        assert float(seconds["Dynamo"]) + float(seconds["joint graph"]) + float(seconds["aot_eager"]) > 0
        total = float(line.split()[1])
        parts = sum(map(float, re.findall(r" ([0-9]+\.[0-9])(?:[,.]|$)", line.partition(": build")[2])))
        assert 0 < parts <= total + 1


def test_another_line_says_what_runs_and_what_does_not(ranks: Ranks) -> None:
    for lines in ranks.run(2, _lines, Parts, "Runs"):
        [line] = lines
        assert line.startswith("Runs: ZeRO-3 over 2 x cpu; compiled: 'net'; weights use ")
        assert "; gradients use collectives (" in line
        assert "forward and backward not replayed: the device is cpu; optimizer step not replayed: there are no" in line
        assert re.search(r"\. On each rank: 0\.0 MiB of shards, gradients, copies and optimizer state", line)


class Alone(Parts):
    def training_step(self, batch, batch_idx):
        return (
            super().training_step(batch, batch_idx) + 0 * torch.func.grad(lambda x: self.net(x).sum())(batch[0]).sum()
        )


def test_it_says_what_runs_eagerly_and_why(ranks: Ranks) -> None:
    for lines in ranks.run(2, _lines, Alone, "Runs"):
        assert "compiled: nothing yet; 'net' runs eagerly: it is called inside torch.func" in lines[0]
