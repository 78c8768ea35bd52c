"""Modules that look for their dtype and device among their parameters, as transformers' `self.dtype` does."""

import copy

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.helpers.sharded import adamw, engine_for
from tests.helpers.trainer import seeded
from tests.ranks.pool import Ranks


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    @property
    def dtype(self) -> torch.dtype:
        return next(param.dtype for param in self.parameters() if param.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.dtype))
        return self.second(x.to(self.device) + torch.ones(4, dtype=self.dtype, device=self.device))


def trained() -> tuple[int, int, list[float], list[float]]:
    """Return the numbers of graphs and breaks, and the losses beside those of one process."""
    with seeded():
        model = Queries()
    plain, x = copy.deepcopy(model), torch.arange(8.0).view(2, 4)
    torch._dynamo.reset()
    counters.clear()
    losses: tuple[list[float], list[float]] = ([], [])
    optimizer = adamw(plain)
    for _ in range(4):
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[1].append(loss.item())
    with engine_for(model, "aot_eager") as engine:
        optimizer = adamw(model)
        for _ in range(4):
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses[0].append(loss.item())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), *losses


def test_they_break_no_graph(ranks: Ranks) -> None:
    for graphs, breaks, losses, expected in ranks.run(2, trained, deadline=120):
        assert (graphs, breaks) == (1, 0)
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
