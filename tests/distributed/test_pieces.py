"""Equal layers are compiled once, and train as one process does, wherever gathers and gradients run between them."""

import re
from functools import cache
from typing import Any

import pytest
from functorch.compile import config as functorch_config

from tests.helpers.logs import logged
from tests.helpers.models import Deep, build
from tests.helpers.oracle import Batch, Reference, assert_close_relative, train_reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


class FourLayers(Deep):
    def __init__(self) -> None:
        super().__init__()
        del self.layers[4:]


def batches(lengths: tuple[int, ...]) -> list[Batch]:
    return [Deep.make_batch(step, lengths[step % len(lengths)]) for step in range(6)]


@cache
def expected(world: int, lengths: tuple[int, ...]) -> Reference:
    return train_reference(build(FourLayers), batches(lengths), sgd, world=world)


def train(lengths: tuple[int, ...], options: dict[str, Any]) -> tuple[Reference, list[str]]:
    model = build(FourLayers)
    with (
        logged("lightning_zero.compile.backend") as lines,
        functorch_config.patch(
            enable_autograd_cache=False
        ),  # graphs of an earlier run would be read from it as a whole
        # Two and a half layers in a group.
        engine_for(model, "inductor", gather_group_mb=0.02, reduce_group_mb=0.02, **options) as engine,
    ):
        record = train_sharded(engine, model, batches(lengths), sgd(model))
        return record, [line for line in lines if line.startswith("Subgraphs: compiled")]


@pytest.mark.exhaustive  # test_warm_start.py trains in pieces
@pytest.mark.parametrize(
    ("world_size", "lengths", "options"),
    [
        (1, (60,), {"compile_whole_graphs": True}),
        # Another length: sizes become dynamic, and everything is compiled once more.
        (2, (60, 84), {"unsharded_cache_mb": 0.01, "unsharded_cache_until": "step", "gather_transport": "collective"}),
    ],
    ids=["whole graphs", "two lengths, some weights stay"],
)
def test_pieces_train_as_one_process_does(
    ranks: Ranks, world_size: int, lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    out, lines = ranks.run(world_size, train, lengths, options, deadline=500)[0]
    for what in ("losses", "grads", "params"):
        assert_close_relative(getattr(out, what), getattr(expected(world_size, lengths), what), 1e-5, what=what)
    if "compile_whole_graphs" in options:
        assert not lines
    else:
        assert len(lines) >= 2, lines  # forward and backward
        for line in lines:
            calls, new = map(int, re.findall(r"(?:calls|new)=(\d+)", line))
            assert new < calls
