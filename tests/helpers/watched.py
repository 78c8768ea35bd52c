"""An engine with an impatient watchdog and a small model; and the watchdog's messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.errors import RankFailedError
from lightning_zero.native.watchdog import Watchdog
from tests.helpers.options import config

__all__ = ["step", "verdict", "watched"]

WIDTH = 64


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@contextmanager
def watched(
    report_s: float = 1.0, timeout_s: float = 60.0, gather_transport: str = "collective"
) -> Iterator[tuple[Engine, nn.Module]]:
    torch.manual_seed(0)
    chosen = config(
        compile=False,
        report_stall_after_s=report_s,
        gather_transport=gather_transport,
        timeout=timedelta(seconds=timeout_s),
    )
    engine = Engine(torch.device("cpu"), chosen)
    model = Two()
    engine.shard(model)
    try:
        yield engine, model
    finally:
        engine.close()


def step(engine: Engine, model: nn.Module, both: bool = True) -> None:
    with engine.train_step():
        loss = model(torch.ones(2, WIDTH), both).square().mean()
    engine.cycle.before_backward()
    loss.backward()
    engine.cycle.after_backward()


def verdict(watchdog: Watchdog, seconds: float) -> str:
    """Return the error that ends this rank within these seconds; None if it may continue."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            watchdog.check()
        except RankFailedError as error:
            return str(error)
        time.sleep(0.02)
    return ""
