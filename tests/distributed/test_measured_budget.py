"""``reshard_after_forward="auto"``.

The memory left on the fullest rank decides, once, at the same step on every rank.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from tests.helpers.measured import AGAIN, Blocks, same
from tests.helpers.models import build, make_batches
from tests.helpers.oracle import Batch
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

TOTAL = 10**6
SIZE = 1536  # of a weight, with padding


class Gauge(MemoryGauge):
    """A device on which each rank has so many bytes left."""

    reports_memory = True
    spare: list[int]

    def start(self, anew: bool = False) -> None:
        pass

    def read(self) -> DeviceMemory:
        return DeviceMemory(TOTAL, 0, int(0.9 * TOTAL) - self.spare[dist.get_rank()], 0, 0)


def train(
    spare: list[int], cached: Any = "auto", steps: int = 7, accumulate: int = 1, lengths: bool = False, **options: Any
) -> dict[str, Any]:
    """A training's losses and weights; for each batch, whether it compiled and how many bytes it gathered."""
    torch._dynamo.reset()
    model = build(Blocks)
    graphs: list[int] = [0]
    before: list[tuple[int, int]] = []
    said: list[str] = []

    def count(what: str, graph: Graph) -> None:
        graphs[0] += what == "after"

    def note(*_: Any) -> None:
        before.append((graphs[0], engine.executor.counters().get("gather_bytes", 0)))

    def loss(model: Any, batch: Batch) -> Tensor:
        # Rank 1 sees another number of samples, and compiles for it, later than rank 0.
        rows = 5 if lengths and len(before) > 2 + 2 * dist.get_rank() else 6
        return model.loss(tuple(part[:rows] for part in batch))

    with patch("lightning_zero.compile.session.MemoryGauge", Gauge), patch.object(Gauge, "spare", spare, create=True):
        budget = {"reshard_after_forward": "auto"} if cached == "auto" else {"unsharded_cache_mb": cached}
        settings = {**budget, "gather_group_mb": 0.001, **options}
        with engine_for(model, "aot_eager", observe=count, **settings) as engine:
            engine.session.progress._report = said.append
            batches = make_batches(Blocks, steps * accumulate, 12)
            out = train_sharded(engine, model, batches, sgd(model), loss, accumulate=accumulate, before_batch=note)
            note()
            kept = {g.until for plan in engine.session.plans.plan.graphs for g in plan.gathers}
            stay = [engine.session.planner.step_cache_bytes(engine.config.compiled)]
            for resharded in (False, True):
                tuning = replace(engine.config.tuning, report_stall_after_s=20.0)
                if resharded:
                    tuning = replace(tuning, unsharded_cache_until="backward")
                engine.configure(replace(engine.config, tuning=tuning))
                stay.append(engine.session.planner.step_cache_bytes(engine.config.compiled))
    changes = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, before[1:], strict=False)]
    return {
        "losses": out.losses,
        "params": out.params,
        "compiles_in": [index for index, (compiled, _) in enumerate(changes) if compiled],
        "gathered": [gathered for _, gathered in changes],
        "kept": kept,
        "stay": stay,
        "said": [line for line in said if "auto" in line],
    }


def test_weights_stay_within_what_the_fullest_rank_has_left(ranks: Ranks) -> None:
    budget = 6000
    plain = ranks.run(2, train, [0, 0], 0.0)
    for without, auto in zip(plain, ranks.run(2, train, [TOTAL // 2, budget]), strict=True):
        assert auto["losses"] == without["losses"]
        assert same(auto["params"], without["params"])
        assert auto["compiles_in"] == [1, AGAIN]
        saved = [before - after for before, after in zip(without["gathered"], auto["gathered"], strict=True)]
        assert saved[:AGAIN] == [0] * AGAIN
        # One weight of each block but the first, whose backward needs only two: a graph that several blocks run keeps no
        # more than the budget in all of them together.
        assert saved[-1] == 2 * SIZE <= budget
        assert "backward" in auto["kept"]
        (line,) = auto["said"]
        assert "keeping weights from forward to backward" in line


@pytest.mark.exhaustive  # see test_memory_budget.py
def test_with_room_for_all_everything_stays(ranks: Ranks) -> None:
    for auto in ranks.run(2, train, [TOTAL // 2] * 2):
        assert auto["gathered"][AGAIN - 1 : AGAIN + 1] == [
            17 * SIZE,
            9 * SIZE,
        ]  # each forward needs nine, each backward eight


def test_nothing_is_compiled_again_for_a_budget_that_no_weight_fits_in(ranks: Ranks) -> None:
    for auto in ranks.run(2, train, [TOTAL // 2, 100]):
        assert auto["compiles_in"] == [1]
        (line,) = auto["said"]
        assert "no further weight fits" in line


def accumulate() -> dict[str, Any]:
    return train([TOTAL // 2] * 2, steps=6, accumulate=2, unsharded_cache_until="step")


def test_in_accumulation_weights_stay_until_the_optimizer_steps(ranks: Ranks) -> None:
    for auto in ranks.run(2, accumulate):
        # The first window compiles already; three more are measured, after one that only starts the measurement.
        assert auto["compiles_in"] == [1, 8]
        assert auto["gathered"][-1] == 0
        assert auto["gathered"][-2] > 0
        assert "step" in auto["kept"]
        assert "until the optimizer steps" in auto["said"][0]
        measured, another_option, resharded = auto["stay"]
        assert measured == another_option > 0
        assert resharded == 0, "what was measured is forgotten once something else is wanted"


def other_lengths() -> dict[str, Any]:
    return train([TOTAL // 2, 6000], steps=10, lengths=True)


def test_all_ranks_wait_for_the_last_one_to_compile(ranks: Ranks) -> None:
    first, second = ranks.run(2, other_lengths)
    # Rank 1 compiles for its second length in the fifth batch; the three after that are measured.
    assert first["compiles_in"] == [1, 2, 8]
    assert second["compiles_in"] == [1, 4, 8]
    assert len(first["said"]) == len(second["said"]) == 1
