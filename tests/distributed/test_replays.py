"""Compiled graphs whose forward and backward are replayed, emulated on a CPU: the same books, without the graphs."""

from typing import Any

import pytest
import torch

from tests.helpers.replays import WAYS, train
from tests.ranks.pool import Ranks


def both(way: str) -> tuple[Any, Any]:
    return train(way, "aot_eager", emulate_graphs=True), train(way, "aot_eager")


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].emulated])
def test_replays_train_like_runs_and_count_like_them(ranks: Ranks, way: str) -> None:
    for (replayed, counters), (plain, expected) in ranks.run(2, both, way, deadline=120):
        assert replayed.losses == plain.losses
        for mine, theirs in zip(replayed.params, plain.params, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        replays = counters.pop("replayed_graphs", 0)
        assert replays >= WAYS[way].replays if WAYS[way].replays else replays == 0
        same = ("gathers", "gather_bytes", "reduces", "reduce_bytes", "flushes", "agreements")
        assert {name: counters.get(name) for name in same} == {name: expected.get(name) for name in same}
