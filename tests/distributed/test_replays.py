"""Compiled graphs whose forward and backward are replayed, emulated on a CPU: the same books, without the graphs."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.sharded import train_case
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
MIXED: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
COPY: dict[str, Any] = {"gather_by": "copy", "reduce_by": "copy"}
TO_STEP: dict[str, Any] = {"persist_mb": float("inf"), "persist_until": "step"}
autocast = partial(torch.autocast, "cpu", BF16, cache_enabled=False)

# (case, options of the engine, of the training, replays)
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("OneBlock", {}, {}),
    "clipped": ("OneBlock", {}, {"clip_norm": 0.1}),
    "copies": ("OneBlock", MIXED | COPY, {"context": autocast}),
    "pushed only": ("OneBlock", {"reduce_by": "copy"}, {}),
    "accumulated": ("OneBlock", {}, {"accumulate": 3}),
    "accumulated, kept until the step": ("OneBlock", MIXED | COPY | TO_STEP, {"accumulate": 3, "context": autocast}),
    "gradients zeroed, not dropped": ("OneBlock", {}, {"set_to_none": False}),
    "buffers": ("BatchNormNet", {}, {}),
    "frozen weights": ("LoRA", {}, {}),
}


def trained(way: str, emulate: bool) -> tuple[Any, dict[str, int]]:
    case, options, training = WAYS[way]
    return train_case(case, "aot_eager", 14, engine_options=options | {"emulate_graphs": emulate}, **training)


@pytest.mark.parametrize("way", WAYS)
def test_replays_train_like_runs_and_count_like_them(ranks: Ranks, way: str) -> None:
    for (replayed, counters), (plain, expected) in zip(
        ranks.run(2, trained, way, True), ranks.run(2, trained, way, False), strict=True
    ):
        assert replayed.losses == plain.losses
        for mine, theirs in zip(replayed.params, plain.params, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert counters["replayed_graphs"] >= 12
        same = ("gathers", "gather_bytes", "reduces", "reduce_bytes", "flushes", "agreements")
        assert {name: counters.get(name) for name in same} == {name: expected.get(name) for name in same}
