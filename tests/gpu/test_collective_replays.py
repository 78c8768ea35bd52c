"""Forward and backward as CUDA graphs that hold NCCL's collectives.

They train like runs, go along with ranks that run, and do not outlive the process groups.
"""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.errors import UnsupportedError
from tests.helpers.models import build
from tests.helpers.oracle import assert_close_relative
from tests.helpers.replays import (
    BY_COLLECTIVE,
    COPY,
    SHORTER_ON_ONE,
    WAYS,
    graphs_are_cut,
    train,
    train_up_to_a_replayed_forward,
)
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

BOTH = BY_COLLECTIVE["weights and gradients"]
COUNTED = ("gathers", "reduces", "flushes", "agreements", "met_control", "met_gather", "met_reduce")


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def counted(counters: dict[str, int]) -> dict[str, int | None]:
    return {name: counters.get(name) for name in COUNTED}


def both(way: str, backend: str, **options: Any) -> tuple[Any, Any, int]:
    results = [train(way, backend, device(), cuda_graph_model=capture, **options) for capture in (True, False)]
    left = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return *results, sum(segment["allocated_size"] for segment in left)


def check(ranks: Ranks, world_size: int, way: str, backend: str, by: str) -> None:
    found = ranks.run(world_size, both, way, backend, **BY_COLLECTIVE[by], backend="nccl", deadline=150)
    for (replayed, counters), (plain, expected), left in found:
        # Gradients that are sent one by one are not rounded together.
        far = 20 if WAYS[way].twice else 1
        assert_close_relative(replayed.losses, plain.losses, far * 1e-4, what="losses")
        assert_close_relative(replayed.params, plain.params, far * 1e-3, what="weights")
        assert counters["replayed_graphs"] >= WAYS[way].replays
        if not graphs_are_cut(way):
            assert counted(counters) == counted(expected)
        assert left == 0, "an engine that is closed holds memory of graphs"


CAPTURED = [way for way in WAYS if WAYS[way].replays]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", CAPTURED)
def test_replays_train_like_runs_and_meet_as_often(ranks: Ranks, way: str) -> None:
    check(ranks, 2, way, "inductor" if WAYS[way].generated else "aot_eager", "weights and gradients")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("by", ["weights", "gradients"])
def test_copies_go_beside_collectives_in_one_graph(ranks: Ranks, by: str) -> None:
    check(ranks, 2, "accumulated, kept until the step", "aot_eager", by)


@pytest.mark.gpu(2)
def test_replays_of_generated_code_train_like_runs(ranks: Ranks) -> None:
    check(ranks, 2, "accumulated, kept until the step", "inductor", "weights and gradients")


@pytest.mark.gpu(1)
def test_one_rank_replays_too(ranks: Ranks) -> None:
    check(ranks, 1, "clipped", "aot_eager", "weights and gradients")


def one_replays(rank: int, way: str, by: str) -> tuple[Any, Any]:
    return train(way, "aot_eager", device(), cuda_graph_model=dist.get_rank() == rank, **BY_COLLECTIVE[by])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by", BY_COLLECTIVE)
def test_a_rank_that_runs_goes_along_with_one_that_replays(ranks: Ranks, rank: int, by: str) -> None:
    way = "accumulated, kept until the step"
    found = ranks.run(2, one_replays, rank, way, by, backend="nccl", deadline=120)
    replayed, ran = found[rank], found[1 - rank]
    assert replayed[1]["replayed_graphs"] >= WAYS[way].replays
    assert "replayed_graphs" not in ran[1]
    assert counted(replayed[1]) == counted(ran[1])
    assert replayed[0].losses == ran[0].losses
    assert_close_relative(replayed[0].params, ran[0].params, 1e-6, what="weights")


@pytest.mark.gpu(2)
def test_a_rank_captures_another_length_while_the_other_replays(ranks: Ranks) -> None:
    found = ranks.run(2, both, "shorter on one", "aot_eager", backend="nccl", deadline=150)
    for (replayed, counters), (plain, expected), left in found:
        assert_close_relative(replayed.losses, plain.losses, 1e-4, what="losses")
        assert_close_relative(replayed.params, plain.params, 1e-3, what="weights")
        assert counters["replayed_graphs"] >= SHORTER_ON_ONE.replays
        assert counted(counters) == counted(expected)
        assert left == 0
    assert found[0][0][1]["replayed_graphs"] > found[1][0][1]["replayed_graphs"]


def registering() -> str:
    with patch.dict(os.environ, {"NCCL_GRAPH_REGISTER": "1"}):
        try:
            train("clipped", "aot_eager", device(), cuda_graph_model=True, **BOTH)
        except UnsupportedError as error:
            return str(error)
    return "it trained"


@pytest.mark.gpu(2)
def test_what_would_not_fit_together_with_runs_is_refused_by_name(ranks: Ranks) -> None:
    for text in ranks.run(2, registering, backend="nccl"):
        assert "weights and gradients use collectives, and NCCL_GRAPH_REGISTER is not 0" in text


def destroyed() -> int:
    """A loss whose backward never ran holds its graph, and the graph the collectives' communicators."""
    model: Any = build("OneBlock").to(device())
    with engine_for(model, "aot_eager", device=device(), cuda_graph_model=True, **(COPY | BOTH)) as engine:
        loss, replayed = train_up_to_a_replayed_forward(engine, model)
        mesh = engine.mesh
    for group in (mesh.gather_group, mesh.reduce_group):
        dist.destroy_process_group(group)  # waits until no graph holds its collectives
    assert loss is not None
    return replayed


@pytest.mark.gpu(2)
def test_process_groups_can_be_destroyed_once_the_engine_is_closed(ranks: Ranks) -> None:
    assert ranks.run(2, destroyed, backend="nccl", deadline=90) == [5, 5]


def connected(options: dict[str, Any]) -> list[bool]:
    """Return True if the groups for gathers and for reductions have communicators after a replay."""
    world = dist.group.WORLD
    assert world is not None
    dist.barrier(device_ids=[torch.cuda.current_device()])
    world.bound_device_id = torch.device(device())  # as Lightning makes it: groups split its communicator at once
    model: Any = build("OneBlock").to(device())
    with engine_for(model, "aot_eager", device=device(), cuda_graph_model=True, **options) as engine:
        train_up_to_a_replayed_forward(engine, model)
        groups = engine.mesh.gather_group, engine.mesh.reduce_group
        return [group._get_backend(engine.device)._is_initialized() for group in groups]  # type: ignore[attr-defined]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("by_copies", [True, False])
def test_a_communicator_that_copies_make_superfluous_is_not_made(ranks: Ranks, by_copies: bool) -> None:
    found = ranks.run(2, connected, COPY if by_copies else COPY | BOTH, backend="nccl", deadline=90)
    assert found == [[True, not by_copies]] * 2
