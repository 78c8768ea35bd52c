"""SOAP on shards: the weights of a single process, and a checkpoint that continues at another world size.

Gradients have full rank on each side that is preconditioned: the eigenvectors of others depend on rounding errors.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.update_rules import rule_for
from tests.helpers.reference_optimizers import SOAP
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

STEPS = 12
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small buckets": ({}, {"matrix_bucket_mb": 0.001}),
    "other settings, emulated capture": (
        {"shampoo_beta": 0.8, "correct_bias": False, "normalize_gradient": True, "eps": 1e-3},
        {"emulate_cuda_graph_step": True},
    ),
    "no side": ({"max_precondition_dim": 5}, {"stage": 1}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.wide = nn.Linear(8, 40, bias=False)  # one side only is preconditioned
        self.experts = nn.Parameter(torch.randn(2, 8, 40) / 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))) + x)
        wide = torch.tanh(self.wide(x))
        return torch.cat([wide @ expert.T for expert in self.experts], 1)


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    x, y = torch.randn(96, 8, generator=rng), torch.randn(96, 16, generator=rng)
    return x[rank::world], y[rank::world]


@cache
def expected_of(name: str) -> dict[str, Tensor]:
    model = Net()
    optimizer = SOAP(model.parameters(), **WAYS[name][0])
    for step in range(STEPS):
        x, y = batch(step)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.named_parameters()}


def train(name: str, steps: range, saved: Any = None) -> Any:
    settings, options = WAYS[name]
    model = Net()
    if saved is not None:
        model.load_state_dict(saved[0])
    with engine_for(model, "eager", **options) as engine:
        optimizer = SOAP(model.parameters(), **settings)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        if saved is not None:
            engine.load_optimizer_state(optimizer, saved[1])
        for step in steps:
            x, y = batch(step, engine.rank, engine.world_size)
            with engine.train_step():
                loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return whole_params(engine, model), engine.optimizer_state(optimizer)


def train_all() -> dict[str, Any]:
    return {name: train(name, range(STEPS))[0] for name in WAYS}


def check(found: dict[str, Tensor], name: str) -> None:
    begin = dict(Net().named_parameters())
    assert max(float((found[key] - value.detach()).abs().max()) for key, value in begin.items()) > 0.05
    for key, value in expected_of(name).items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=2e-4, msg=partial("{}, {}: {}".format, name, key))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_are_those_of_one_process(ranks: Ranks, world_size: int) -> None:
    for found in ranks.run(world_size, train_all, deadline=90):
        for name in WAYS:
            check(found[name], name)


def test_a_checkpoint_continues_at_another_world_size(ranks: Ranks) -> None:
    name, half = "small buckets", STEPS // 2
    saved = ranks.run(2, train, name, range(half), deadline=60)[0]
    for found, _ in ranks.run(3, train, name, range(half, STEPS), saved, deadline=60):
        check(found, name)


@pytest.mark.parametrize("option", ["merge_dims", "maximize"])
def test_options_without_a_rule_are_refused(option: str) -> None:
    optimizer = SOAP(Net().parameters(), **({"merge_dims": True} if option == "merge_dims" else {}))
    optimizer.maximize = option == "maximize"
    with pytest.raises(UnsupportedError, match=f"SOAP has {option}=True.*register_matrix_rule"):
        rule_for(optimizer, optimizer.param_groups[0])
