"""Graphs that were compiled before come out of the compiler's caches, with their plans."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.helpers.models import build, make_batches
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


def compile_twice(folder: str) -> list[dict[str, Any]]:
    found = []
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{dist.get_rank()}"}
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = build("OddMLP")
        with patch.dict(os.environ, cache), engine_for(model, "inductor", small_bytes=0) as engine:
            out = train_sharded(engine, model, make_batches("OddMLP", 3, 12), sgd(model))
            found.append(
                {
                    "losses": out.losses,
                    "plans": [graph.digest for graph in engine.session.plans.plan.graphs],
                    "hits": counters["inductor"]["fxgraph_cache_hit"],
                    "misses": counters["inductor"]["fxgraph_cache_miss"],
                    "aot": counters["aot_autograd"]["autograd_cache_hit"],
                }
            )
    return found


@pytest.mark.slow
def test_the_second_time_nothing_is_compiled(ranks: Ranks, tmp_path: Any) -> None:
    for cold, warm in ranks.run(1, compile_twice, str(tmp_path), deadline=240):
        assert (cold["hits"], cold["misses"], cold["aot"]) == (0, 2, 0)
        assert (warm["hits"], warm["misses"], warm["aot"]) == (2, 0, 1)
        assert warm["losses"] == cold["losses"]
        assert len(warm["plans"]) == 2
        assert warm["plans"] == cold["plans"]
