"""Models of which each rank calls other parts, other times."""

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """A hand-written mixture: an expert without tokens is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(19, 25)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(25, 26), nn.Tanh(), nn.Linear(26, 25)) for _ in range(3))
        self.cell = nn.Linear(25, 25)
        self.leave = nn.Linear(25, 13)

    def forward(self, x: Tensor, chosen: list[int], times: int) -> Tensor:
        x = torch.tanh(self.enter(x))
        for expert in chosen:
            x = x + self.experts[expert](x)
        for _ in range(times):
            x = torch.tanh(self.cell(x))
        return self.leave(x)


# By step and rank: which experts, and how often the cell. The last is called by no rank in the first two steps.
CHOICES = [
    [([0], 1), ([1], 3), ([0], 2)],
    [([], 2), ([0, 1], 0), ([1], 1)],
    [([0, 1, 2], 1), ([], 1), ([2], 4)],
    [([2], 0), ([2, 1], 2), ([], 1)],
    [([1], 1), ([0], 1), ([], 0)],
]


class Parts(nn.Module):
    """Like :class:`Experts`, but its experts are compiled, and the module that calls them is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts()

    def loss(self, x: Tensor, chosen: list[int], times: int) -> Tensor:
        inner = self.inner
        x = torch.tanh(inner.enter(x))
        for expert in chosen:
            x = x + inner.experts[expert](x)
        for _ in range(times):
            x = torch.tanh(inner.cell(x))
        return inner.leave(x).square().mean()


def batches(world_size: int) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(len(CHOICES), world_size, 6, 19)
