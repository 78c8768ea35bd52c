"""What users read while something is compiled: which module, and what for."""

import pytest
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


def _lines(make: type[Regression]) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_zero.integrations.trainer.strategy.rank_zero_info", said.append)
        with fitted("compiled", make, 2) as (module, trainer):
            trainer.validate(module, make_loader("compiled", 1), verbose=False)
    return [line for line in said if line.startswith("Compiling")]


def test_they_name_the_module_and_the_purpose(ranks: Ranks) -> None:
    for lines in ranks.run(2, _lines, Parts):
        what = "'net' (Sequential) for {} (a graph of 4 weights, '0.weight' to '2.bias'); this step takes longer."
        assert lines == [f"Compiling {what.format(purpose)}" for purpose in ("training", "evaluation")]
    for lines in ranks.run(2, _lines, Regression):
        assert lines[0].startswith("Compiling the whole Regression for training (a graph of 6 weights, 'net.0.weight'")
