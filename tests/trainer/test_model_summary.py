"""Parameters are counted as whole ones, wherever a user or Lightning counts them."""

import contextlib
import io
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

import lightning_zero
from tests.helpers.trainer import INPUTS, OUTPUTS, WIDTH, Regression, close, make_loader, make_trainer, seeded
from tests.ranks.pool import Ranks


class Summarised(Regression):
    """Has a tied and a frozen parameter, one of the root, and a scalar; its example input gives shapes."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.tied = nn.Linear(INPUTS, WIDTH)
            self.norm = nn.BatchNorm1d(OUTPUTS)
        self.tied.weight = self.net[0].weight
        self.net[2].weight.requires_grad_(False)
        self.offset = nn.Parameter(torch.zeros(OUTPUTS))
        self.scale = nn.Parameter(torch.ones(()))
        self.example_input_array = torch.ones(4, INPUTS)

    def forward(self, x: Any) -> Any:
        return self.norm(self.net(x)) * self.scale + self.offset


class Tables(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, module: pl.LightningModule) -> None:
        self.seen.append(str(summarize(module, max_depth=-1)))
        self.seen.append([param.numel() for param in module.parameters()])
        self.seen.append(sum(param.nelement() for param in module.parameters() if param.requires_grad))

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.note(module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.note(module)


class Table(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _summarised(kind: str) -> Any:
    module, tables, table = Summarised(), Tables(), Table()
    before = [param.numel() for param in module.parameters()]
    log = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.addHandler(table)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make_trainer(kind, callbacks=[tables, ModelSummary(max_depth=2)]).fit(module, make_loader(kind, 2))
    finally:
        log.removeHandler(table)
    after = []
    if kind != "ddp":
        with lightning_zero.full_parameters(module):
            after.append([param.numel() for param in module.parameters()])
        lightning_zero.unshard(module)
        after.append([param.numel() for param in module.parameters()])
        assert not any("numel" in param.__dict__ for param in module.parameters())
    close(module)
    return table.lines, tables.seen, before, after


def _summarised_under(*kinds: str) -> dict[str, Any]:
    return {kind: _summarised(kind) for kind in kinds}


@pytest.mark.parametrize("kind", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_summaries_equal_ddps(ranks: Ranks, kind: str) -> None:
    for rank, result in enumerate(ranks.run(2, _summarised_under, "ddp", kind)):
        (table, seen, before, after), (expected, expected_seen, *_) = result[kind], result["ddp"]
        assert len(table) == (rank == 0)
        assert table == expected
        assert seen == expected_seen
        assert after == [before, before]
