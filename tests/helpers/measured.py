"""Measurements of a device and decisions by them, in tests of memory.

A model, and a comparison of its trainings.
"""

import torch
from torch import Tensor, nn

from tests.helpers.models import Case
from tests.helpers.oracle import Batch

# The first step runs eagerly, the second compiles; three are measured. So the sixth batch compiles again.
AGAIN = 5


class Blocks(Case):
    """Called one by one, so that three blocks run one graph; each holds three weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = ([layer for _ in range(3) for layer in (nn.Linear(19, 19, bias=False), nn.Tanh())] for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 19, generator=rng)

    def loss(self, batch: Batch) -> Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        return self.criterion(x, target)


def same(mine: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> bool:
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
