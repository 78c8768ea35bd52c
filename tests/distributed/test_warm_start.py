"""Compiled graphs are read from the compiler's caches, with their plans."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.helpers.models import Case, Deep, build, make_batches
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


def compile_twice(folder: str, case: str | type[Case], samples: int) -> list[dict[str, Any]]:
    found = []
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{dist.get_rank()}"}
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = build(case)
        with patch.dict(os.environ, cache), engine_for(model, "inductor", small_bytes=0) as engine:
            out = train_sharded(engine, model, make_batches(case, 3, samples), sgd(model))
            found.append(
                {
                    "losses": out.losses,
                    "plans": [graph.digest for graph in engine.session.plans.plan.graphs],
                    "misses": counters["inductor"]["fxgraph_cache_miss"],
                    "aot": counters["aot_autograd"]["autograd_cache_hit"],
                    "saved": counters["aot_autograd"]["autograd_cache_saved"],
                }
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "samples"),
    [pytest.param("NeverUsed", 12, marks=pytest.mark.exhaustive), (Deep, 60)],
    ids=["whole", "in pieces"],
)
def test_the_second_time_nothing_is_compiled(ranks: Ranks, tmp_path: Any, case: str | type[Case], samples: int) -> None:
    for cold, warm in ranks.run(1, compile_twice, str(tmp_path), case, samples, deadline=240):
        assert (cold["aot"], cold["saved"]) == (0, 1)
        assert (cold["misses"] > 2) == (case is Deep)  # pieces, each of which is kept by itself, too
        # Forward and backward, with the pieces that they are made of: nothing is even traced.
        assert (warm["aot"], warm["saved"], warm["misses"]) == (1, 0, 0)
        assert warm["losses"] == cold["losses"]
        assert len(warm["plans"]) == 2
        assert warm["plans"] == cold["plans"]
