"""Compiled graphs that are replayed where collectives move weights, gradients, or both: emulated on a CPU, which keeps
the same books and runs the collectives each time.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.compile.cuda_graphs import graph_pairs as pairs
from tests.helpers.models import OneLayer, build, make_batches
from tests.helpers.oracle import shard_batch
from tests.helpers.replays import BF16, BY_COLLECTIVE, COPY, SHORTER_ON_ONE, TO_STEP, WAYS, meetings, train
from tests.helpers.sharded import adamw, engine_for, whole_params
from tests.ranks.pool import Ranks

COUNTED = (
    *("gathers", "gather_bytes", "reduces", "reduce_bytes", "flushes", "agreements"),
    *("met_control", "met_gather", "met_reduce"),
)


def counted(counters: dict[str, int]) -> dict[str, int | None]:
    return {name: counters.get(name) for name in COUNTED}


def both(way: str, **options: Any) -> tuple[Any, Any]:
    return train(way, "aot_eager", emulate_cuda_graph_model=True, **options), train(way, "aot_eager", **options)


def check(ranks: Ranks, world_size: int, way: str, by: str) -> None:
    for (replayed, counters), (plain, expected) in ranks.run(world_size, both, way, **BY_COLLECTIVE[by], deadline=150):
        assert replayed.losses == plain.losses
        for mine, theirs in zip(replayed.params, plain.params, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert counters["replayed_graphs"] >= WAYS[way].replays
        assert counted(counters) == counted(expected)


@pytest.mark.parametrize(
    ("way", "world_size"),
    [("clipped", 2), pytest.param("accumulated, kept until the step", 3, marks=pytest.mark.slow)],
)
@pytest.mark.exhaustive_variants("accumulated, kept until the step-3")
def test_replays_train_like_runs_and_meet_as_often(ranks: Ranks, world_size: int, way: str) -> None:
    check(ranks, world_size, way, "weights and gradients")


@pytest.mark.parametrize("by", [pytest.param("weights", marks=pytest.mark.exhaustive), "gradients"])
def test_copies_go_beside_collectives_in_one_replay(ranks: Ranks, by: str) -> None:
    check(ranks, 2, "accumulated", by)


def rank_0_replays(way: str) -> tuple[Any, Any]:
    return train(
        way, "aot_eager", emulate_cuda_graph_model=dist.get_rank() == 0, **BY_COLLECTIVE["weights and gradients"]
    )


def test_a_rank_that_runs_goes_along_with_one_that_replays(ranks: Ranks) -> None:
    (replayed, counters), (ran, expected) = ranks.run(
        2, rank_0_replays, "accumulated, kept until the step", deadline=120
    )
    assert counters["replayed_graphs"] >= 12
    assert "replayed_graphs" not in expected
    assert counted(counters) == counted(expected)
    assert replayed.losses == ran.losses


@pytest.mark.exhaustive  # a rank that runs goes along with one that replays
def test_a_rank_captures_another_length_while_the_other_replays(ranks: Ranks) -> None:
    found = ranks.run(2, both, "shorter on one", deadline=150)
    for (replayed, counters), (plain, expected) in found:
        assert replayed.losses == plain.losses
        assert counters["replayed_graphs"] >= SHORTER_ON_ONE.replays
        assert counted(counters) == counted(expected)
    assert found[0][0][1]["replayed_graphs"] > found[1][0][1]["replayed_graphs"]


class Interruption(Exception):
    pass


def fails(*args: Any) -> None:
    raise Interruption


def interrupted(replayed: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """The backward of the tenth batch has no effect, on every rank; without replays, there is no tenth."""
    torch.manual_seed(3)
    model = build(OneLayer)
    options = COPY | TO_STEP | BY_COLLECTIVE["weights and gradients"]
    with engine_for(model, "aot_eager", emulate_cuda_graph_model=replayed, **options) as engine:
        optimizer = adamw(model)
        for index, batch in enumerate(make_batches(OneLayer, 14, 12)):
            if index == 9 and not replayed:
                continue
            mine = shard_batch(batch, engine.rank, engine.world_size)
            with engine.train_step(), torch.autocast("cpu", BF16, cache_enabled=False):
                loss = model.loss(mine)
            if index == 9:  # a started collective has ended before it is recorded
                with patch.object(pairs, "_started", fails), pytest.raises(Interruption):
                    loss.backward()
                optimizer.zero_grad()
                continue
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return whole_params(engine, model), engine.executor.counters() | meetings(engine)


def interrupted_and_not() -> tuple[Any, Any]:
    return interrupted(replayed=True), interrupted(replayed=False)


def test_what_comes_after_an_interrupted_replay_fits_together_again(ranks: Ranks) -> None:
    found = ranks.run(2, interrupted_and_not, deadline=120)
    for (params, counters), (expected, _) in found:
        assert counters["aborted_backwards"] == 1
        assert counters["replayed_graphs"] > 12
        assert all(torch.equal(params[name], expected[name]) for name in expected)
    (one, _), (other, _) = found
    assert counted(one[1]) == counted(other[1])


def why_not() -> tuple[str, str]:
    with engine_for(build("OneBlock"), **BY_COLLECTIVE["gradients"]) as engine:
        return engine.transports.collectives_used, engine.transports.no_capture_reason(engine.executor)


def test_collectives_that_no_graph_can_hold_are_named(ranks: Ranks) -> None:
    for missing, reason in ranks.run(2, why_not):
        assert missing == "gradients use collectives"
        assert reason == f"{missing}, and CUDA graphs can contain only NCCL's, not those of backend 'gloo'"
