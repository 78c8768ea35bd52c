"""Layers with symbolic sizes are traced and differentiated once, and train as one process does at any length."""

from functools import cache

import pytest
from functorch.compile import config as functorch_config

from lightning_zero.compile.events import OPTIMIZATION_COUNTS
from tests.helpers.lengths import ByLength, Layer
from tests.helpers.models import build
from tests.helpers.oracle import Batch, Reference, assert_close_relative, train_reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks
from tests.unit.compile.dynamo_layer_reuse.layers import counted

# The first step runs eagerly. Lengths over 20, odd ones and 1 need graphs of their own; others do not.
LENGTHS = (6, 8, 12, 9, 30, 1, 2, 14, 11, 25, 1, 3, 18, 26, 2)


def batches() -> list[Batch]:
    return [ByLength.make_batch(step, length) for step, length in enumerate(LENGTHS)]


@cache
def expected(world: int) -> Reference:
    return train_reference(build(ByLength), batches(), sgd, world=world)


def train(backend: str) -> tuple[Reference, int, list[int]]:
    model = build(ByLength)
    OPTIMIZATION_COUNTS.clear()
    with (
        functorch_config.patch(enable_autograd_cache=False),
        counted() as traced,
        engine_for(model, backend) as engine,
    ):
        record = train_sharded(engine, model, batches(), sgd(model))
    layers = [OPTIMIZATION_COUNTS[name] for name in ("layers", "layers differentiated")]
    return record, traced[Layer.__name__], layers


@pytest.mark.parametrize(("world", "backend"), [(1, "inductor"), (2, "aot_eager")], ids=["inductor", "two ranks"])
@pytest.mark.exhaustive_variants("inductor")
def test_layers_of_any_length_train_as_one_process_does(ranks: Ranks, world: int, backend: str) -> None:
    record, traced, (layers, differentiated) = ranks.run(world, train, backend, deadline=500)[0]
    for what in ("losses", "grads", "params"):
        assert_close_relative(getattr(record, what), getattr(expected(world), what), 2e-6, what=what)
    # Even, odd, long and even, long and odd, and 1.
    assert (traced, layers, differentiated) == (5, 20, 5)
