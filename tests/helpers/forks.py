"""Ranks that may use their weights in different orders."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import RankMismatchError
from tests.helpers.models import build
from tests.helpers.sharded import engine_for


class Forks(nn.Module):
    """Uses two weights in an order of the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, swap: bool) -> Tensor:
        first, second = (self.right, self.left) if swap else (self.left, self.right)
        return second(torch.tanh(first(x)))


def run_forks(swaps: dict[int, list[bool]], patience_s: float, delay: dict[int, float], device: str = "cpu") -> Any:
    """Run steps in the orders given for each rank. Return the message of a mismatch, and its seconds."""
    model = build(Forks)
    collective = {"gather_transport": "collective"}  # ranks that copy weights out of peers' memory need no common order
    with engine_for(model, "aot_eager", consensus_timeout_s=patience_s, device=device, **collective) as engine:
        begun = time.monotonic()
        for step, swap in enumerate(swaps[engine.rank]):
            if step == 1:
                time.sleep(delay.get(engine.rank, 0.0))
                begun = time.monotonic()
            try:
                with engine.train_step():
                    loss = model(torch.ones(4, 9, device=engine.device), swap).square().mean()
                loss.backward()
            except RankMismatchError as error:
                return str(error), time.monotonic() - begun
            engine.cycle.before_step()
    return None
