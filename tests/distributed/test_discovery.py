"""A step that calls many modules compiles all of them, and alike ones together."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, whole_params
from tests.ranks.pool import Ranks

LAYERS, STEPS = 12, 3


class Layers(nn.Module):
    def __init__(self, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [5] * (LAYERS + 1) if alike else list(range(3, LAYERS + 4))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))


def step(model: Layers) -> Tensor:
    """The module itself is never called."""
    x = torch.linspace(-1, 1, 2 * model.layers[0].in_features).view(2, -1)
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return x.square().mean()


def train(alike: bool) -> tuple[int, int, dict[str, Tensor]]:
    model, graphs = Layers(alike), 0

    def count(what: str, graph: Graph) -> None:
        nonlocal graphs
        graphs += what == "after"

    with engine_for(model, "aot_eager", count) as engine:
        optimizer = sgd(model)
        for number in range(STEPS):
            with engine.train_step():
                loss = step(model)
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                engine.executor.reset_counters()
        return graphs, engine.executor.counters().get("eager_gathers", 0), whole_params(engine, model)


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])
def test_more_modules_than_dynamo_compiles_of_one_function(ranks: Ranks, alike: bool) -> None:
    plain = Layers(alike)
    optimizer = sgd(plain)
    for _ in range(STEPS):
        step(plain).backward()
        optimizer.step()
        optimizer.zero_grad()
    for graphs, eager, params in ranks.run(2 if alike else 1, train, alike):
        assert eager == 0
        # The first layer's input needs no gradient, so its graphs are others.
        assert graphs == (4 if alike else 2 * LAYERS)
        assert_close_relative(params, dict(plain.named_parameters()), 1e-6, atol=1e-8, what="params")
