"""Trainings whose equal layers are differentiated once, and as often as there are layers: to the last bit."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.compat.compiler import functorch_config
from tests.helpers.logs import logged
from tests.helpers.models import Deep, build
from tests.helpers.oracle import Reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


class Dropping(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(layer, nn.Dropout(0.2)) for layer in self.layers))


def train(backend: str, dtype: torch.dtype | None, whole: bool) -> tuple[Reference, list[str]]:
    batches = [Dropping.make_batch(step, 60) for step in range(3)]
    cast: Any = partial(torch.autocast, "cpu", dtype) if dtype is not None else nullcontext
    model = build(Dropping)
    torch.manual_seed(7)
    with (
        logged("lightning_zero.compile.outline") as lines,
        functorch_config.patch(enable_autograd_cache=False),
        engine_for(model, backend, compute_dtype=dtype, compile_whole_graphs=whole) as engine,
    ):
        return train_sharded(engine, model, batches, sgd(model), context=cast), lines


def both(backend: str, dtype: torch.dtype | None) -> None:
    (once, lines), (each, none) = (train(backend, dtype, whole) for whole in (False, True))
    assert [line.split()[:2] for line in lines] == [["5", "layers"]]  # of six: the first passes no gradient on
    assert not none
    assert once.losses == each.losses
    for grads, expected in zip(once.grads, each.grads, strict=True):
        for name, grad in grads.items():
            assert grad is not None
            assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize(
    ("world", "backend", "dtype"),
    [
        (1, "aot_eager", torch.bfloat16),
        pytest.param(2, "aot_eager", None, marks=pytest.mark.slow),
        pytest.param(1, "inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["autocast", "float32, two ranks", "generated code"],
)
def test_layers_that_are_differentiated_once_train_to_the_last_bit(
    ranks: Ranks, world: int, backend: str, dtype: torch.dtype | None
) -> None:
    ranks.run(world, both, backend, dtype, deadline=400)
