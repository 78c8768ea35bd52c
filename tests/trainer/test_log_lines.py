"""Test the lines that a default run shows at info: their number, their words and their times."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_zero.integrations import console
from tests.helpers.trainer import INPUTS, OUTPUTS, Regression, close, fitted, make_loader, make_trainer
from tests.ranks.pool import Ranks

WIDTH = 64
MOST_LINES = 6  # of a run with two Trainers, one of which may build the executor
START = r"Start: [0-9.]+ s until batch \d+ = ((build|setup|first batch|tracing|compiling|other batches) [0-9.]+( \+ |\.$)){2,6}"
RUNS = (
    r"Runs: ZeRO-3 on {} CPU rank(s)?; compiled: 'net'; no CUDA graphs, because the device is a CPU\. "
    r"Each rank has [0-9.]+ [MK]iB of model state\."
)


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


@contextmanager
def ours() -> Iterator[list[str]]:
    """Collect this package's logs from info on, through Lightning's logger on rank 0 and through its own."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_zero")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def info(line: str) -> None:
        if rank_zero_only.rank == 0:
            lines.append(line)

    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(console, "rank_zero_info", info)
            yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _default_run(home: str) -> list[list[str]]:
    """Fit with validation, save, and fit with a second Trainer, which adopts the module.

    Return each one's lines.
    """
    torch.compiler.reset()
    module, found = Parts(), []
    for _ in range(2):
        with ours() as lines:
            trainer = make_trainer("compiled", max_epochs=3, num_sanity_val_steps=2)
            trainer.fit(module, make_loader("compiled", 5), make_loader("compiled", 2, seed=1))
            trainer.save_checkpoint(f"{home}/end.ckpt")
        found.append(lines)
    close(module)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_default_run_shows_few_lines_on_rank_0(ranks: Ranks, tmp_path: Any, world_size: int) -> None:
    first, *others = ranks.run(world_size, _default_run, str(tmp_path))
    one, two = first
    assert all(lines == [] for other in others for lines in other), "only rank 0 logs"
    progress = [line for line in one + two if re.match(r"(Compiling|Building) .*: \d+ s", line)]  # on a slow machine
    one, two = ([line for line in lines if line not in progress] for lines in first)
    assert len(one) + len(two) <= MOST_LINES
    start, runs = one
    assert re.fullmatch(START, start), start
    assert re.fullmatch(RUNS.format(world_size), runs), runs
    assert re.fullmatch(RUNS.format(world_size), two[-1]), two
    assert all(re.fullmatch(START, line) for line in two[:-1]), two
    for line in one + two:
        assert not re.search(r"GLOBAL_STATE|args\[|_modules|# ", line), "Dynamo's words"
        assert len(line) < 200


def _times(line: str) -> tuple[float, dict[str, float]]:
    total, _, parts = line.removeprefix("Start: ").rstrip(".").partition(" s until batch ")
    named = [part.rsplit(" ", 1) for part in parts.partition(" = ")[2].split(" + ")]
    return float(total), {name: float(seconds) for name, seconds in named}


class Later(Parts):
    """Another graph after some steps, so that a second Trainer compiles too."""

    offset = 0.0

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0] + self.offset) - batch[1]).square().mean()


def _two_starts() -> list[str]:
    torch.compiler.reset()
    module, found = Later(), []
    for _ in range(2):
        with ours() as lines:
            make_trainer("compiled", max_epochs=3).fit(module, make_loader("compiled", 5))
        found += [line for line in lines if line.startswith("Start: ")]
        torch.compiler.reset()  # so that the second Trainer compiles again
    close(module)
    return found


def test_times_add_up_and_are_those_of_one_trainer(ranks: Ranks) -> None:
    first, second = ranks.run(2, _two_starts)[0]
    for line in (first, second):
        total, parts = _times(line)
        assert abs(sum(parts.values()) - total) <= max(0.1 * total, 0.05 * len(parts)), line
        assert parts["tracing"] + parts.get("compiling", 0.0) < total, line


class Shrinking(Parts):
    """Has batches of another length in its second half, as a last batch often has."""

    def training_step(self, batch, batch_idx):
        keep = len(batch[0]) if batch_idx < 3 else 2
        return (self.net(batch[0][:keep]) - batch[1][:keep]).square().mean()


def _lines(make: type[Regression], beginning: str) -> list[str]:
    torch.compiler.reset()
    with ours() as said, fitted("compiled", make, 6) as (module, trainer):
        trainer.validate(module, make_loader("compiled", 1), verbose=False)
    return [line for line in said if line.startswith(beginning)]


def test_a_recompilation_names_the_argument_and_both_sizes(ranks: Ranks) -> None:
    [line] = ranks.run(2, _lines, Shrinking, "Recompiling")[0]
    assert line == "Recompiling 'net' (Sequential) for training: argument 'input' changed in dimension 0 from 3 to 2."


class Alone(Parts):
    def training_step(self, batch, batch_idx):
        return (
            super().training_step(batch, batch_idx) + 0 * torch.func.grad(lambda x: self.net(x).sum())(batch[0]).sum()
        )


def test_it_says_what_runs_eagerly_and_why(ranks: Ranks) -> None:
    [line] = ranks.run(2, _lines, Alone, "Runs")[0]
    assert "compiled: nothing yet; 'net' runs eagerly: it is called inside torch.func" in line


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)])

    def forward(self, x):
        for layer in self.layers:
            if x.sum() < 1e9:
                x = layer(x)
        return x


class Loop(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Loop()


def test_it_says_that_nothing_could_be_compiled(ranks: Ranks) -> None:
    [line] = ranks.run(2, _lines, Loop, "Runs")[0]
    assert "; nothing compiled, because torch found no graph in 'net' (it skips a method whose loop" in line
