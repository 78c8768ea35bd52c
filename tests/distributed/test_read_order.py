"""Ranks gather weights by collectives in different orders, so each gets another rank's weight, and the training must
end.

Where every rank reads alone, any order is right.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import RankMismatchError
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, engine_for, whole_grads
from tests.ranks.pool import Ranks

WIDTH = 16


class Pair(nn.Module):
    """Two layers of one size, which may run in either order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turned: bool) -> Tensor:
        one, other = (self.second, self.first) if turned else (self.first, self.second)
        return torch.tanh(other(torch.tanh(one(x)))).square().mean()


def expected(turned: list[bool]) -> dict[str, Tensor]:
    model = Pair()
    torch.stack([model(torch.ones(2, WIDTH), each) for each in turned]).mean().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def turned_on_the_last_rank(options: dict[str, Any]) -> tuple[str, dict[str, Tensor | None], int]:
    """Return the message of a backward in which the last rank exchanges the layers, and gradients.

    After an error, these are the gradients of the next backward after a reset. Also return the number of dropped
    backwards.
    """
    model, said = Pair(), ""
    with engine_for(model, EAGER, **options) as engine:
        last = engine.rank == engine.world_size - 1
        for number in range(3):
            turned = last and number == 1
            try:
                with engine.train_step():
                    loss = model(torch.ones(2, WIDTH), turned)
                loss.backward()
            except RankMismatchError as error:
                said = str(error)
                engine.cycle.reset()
            grads = whole_grads(engine, model)
            if number == 1 and not said:
                break
            model.zero_grad()
        return said, grads, engine.executor.counters().get("aborted_backwards", 0)


@pytest.mark.parametrize(
    "options", [{"gather_transport": "collective"}, {"ranks_per_host": 1}], ids=["by collectives", "over hosts"]
)
def test_weights_that_are_read_in_different_orders_are_an_error_and_what_came_is_dropped(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    for said, grads, aborted in ranks.run(2, turned_on_the_last_rank, options):
        assert "Eager code has read weights in different orders" in said
        assert re.search("one on rank (0; another on rank 1|1; another on rank 0)", said), said
        assert_close_relative(grads, expected([False]), 1e-6)
        assert aborted == 1


def test_ranks_that_read_alone_may_read_in_any_order(ranks: Ranks) -> None:
    for said, grads, _ in ranks.run(2, turned_on_the_last_rank, {}):
        assert said == ""
        assert_close_relative(grads, expected([False, True]), 1e-6)
