"""Muon's step on one GPU, captured and eager, with elementwise work on a second stream, beside torch's own Muon."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)
STEPS = 8
SHAPES = [(512, 1024), (1024, 512), (512, 512), (512, 512), (512, 1024), (1024, 512), (512, 512)]  # in, out
Weights = dict[str, Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*shape, bias=False), nn.Tanh()) for shape in SHAPES))


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    x, y = (torch.randn(256, 512, generator=rng).to(device) for _ in range(2))
    return (model(x) - y).square().mean()


make_optimizer = partial(torch.optim.Muon, lr=0.01, weight_decay=0.1)


def train(bucket_mb: float, capture: bool, device: str = "cuda:0") -> tuple[Weights, int]:
    model = make_model()
    with engine_for(model, "eager", device=device, matrix_bucket_mb=bucket_mb, cuda_graph_step=capture) as engine:
        optimizer = make_optimizer(model.parameters())
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        for step in range(STEPS):
            with engine.train_step():
                loss = loss_of(model, step, engine.device)
            loss.backward()
            with engine.optimizers.stepping(optimizer, clip=1.0):
                optimizer.step()
            optimizer.zero_grad()
        weights = whole_params(engine, model)
        return {key: value.cpu() for key, value in weights.items()}, engine.optimizers.stepper(optimizer).replays


def train_plain(device: str = "cuda:0") -> Weights:
    model = make_model().to(device)
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        loss_of(model, step, torch.device(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().cpu() for key, value in model.named_parameters()}


def check(found: Weights, expected: Weights, tolerance: float) -> None:
    begin = dict(make_model().named_parameters())
    for key, value in expected.items():
        change = (value - begin[key].detach()).norm()
        assert (found[key] - value).norm() < tolerance * change, key


# Several buckets, of about two matrices; one bucket.
@pytest.mark.parametrize("bucket_mb", [1.5, 256.0])
def test_weights_are_those_of_torchs_muon(ranks: Ranks, bucket_mb: float) -> None:
    ((captured, replays),) = ranks.run(1, train, bucket_mb, True, backend="nccl", deadline=120)
    ((eager, none),) = ranks.run(1, train, bucket_mb, False, backend="nccl", deadline=120)
    assert replays >= STEPS - 2
    assert none == 0
    check(captured, eager, 0.002)
    check(captured, train_plain(), 0.04)
