"""Ranks with batches of different lengths train.

Ranks that gather different weights get an error and do not hang.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph

from lightning_zero.errors import RankMismatchError
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.helpers.forks import Forks, run_forks
from tests.helpers.models import NextToken, build, make_batches
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, whole_params
from tests.ranks.pool import RankFailure, Ranks

STEPS = 12
LENGTHS = [[8, 3, 8, 8, 5, 6], [8, 8, 8, 6, 8, 4], [4, 8, 7, 8, 8, 8]]  # [rank][step]

# Compute hides about as much as there is to transfer, so that the length of a batch matters for where gathers start.
BALANCED = CostModel(((1, 1e-9),), DeviceSpeed({torch.float32: 1e10}, 1e12, 1e-9))


class Residual(NextToken):
    """Return the settings that depend on the batch's length, without slow compilations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 61, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x + self.mlp(x))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Another number of samples and another length on each rank, changing at different steps."""
    ids, target = make_batches(Residual, STEPS, 12)[step]
    length = LENGTHS[rank][step % 6]
    rows = 2 + (step * (rank + 1)) % 3
    return ids[rank : rank + rows, :length], target[rank : rank + rows, :length]


def train_on_all_lengths() -> tuple[list[dict[str, Tensor]], int, list[list[int]]]:
    model = build(Residual)
    graphs = 0

    def count(what: str, graph: Graph) -> None:
        nonlocal graphs
        graphs += what == "after"

    params = []
    with engine_for(model, "aot_eager", observe=count, costs=BALANCED, gather_group_mb=0.01) as engine:
        optimizer = sgd(model)
        for step in range(STEPS):
            with engine.train_step():
                loss = model.loss(batch_of(step, engine.rank))
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            params.append(whole_params(engine, model))
        starts = [[gather.started for gather in plan.gathers] for plan in engine.session.plans.plan.graphs]
        assert len({plan.digest for plan in engine.session.plans.plan.graphs}) == len(engine.session.plans.plan.graphs)
    return params, graphs, starts


@pytest.mark.slow
def test_ranks_with_batches_of_different_lengths_train(ranks: Ranks) -> None:
    world_size, model = 2, build(Residual)
    optimizer = sgd(model)
    expected = []
    for step in range(STEPS):
        for rank in range(world_size):
            (model.loss(batch_of(step, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: param.detach().clone() for name, param in model.named_parameters()})
    found = ranks.run(world_size, train_on_all_lengths, deadline=120)
    assert found[0][2] != found[1][2], "gathers start elsewhere, and are the same"
    for params, graphs, _ in found:
        assert_close_relative(params, expected, 2e-5, what="params")
        # A forward and a backward for fixed sizes, then for variable ones.
        assert graphs <= 8


def train_after_other_compilations() -> tuple[list[dict[str, Tensor]], list[int]]:
    """Torch 2.14 notes at tensors which of their sizes were symbols: later graphs of one have more inputs."""
    model, inputs, params = build(Residual), [], []

    def count(what: str, graph: Graph) -> None:
        if what == "joint":
            inputs.append(len(graph.find_nodes(op="placeholder")))

    with engine_for(model, "aot_eager", observe=count, compile_dynamic=True, gather_group_mb=0.01) as engine:
        optimizer = sgd(model)
        for step in range(6):
            ids, target = batch_of(step, engine.rank)
            ids = ids.clone()
            if engine.rank == 0:
                torch.compile(lambda x: x * 2, backend="eager", dynamic=True)(ids)
            with engine.train_step():
                loss = model.loss((ids, target))
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            params.append(whole_params(engine, model))
    return params, inputs


@pytest.mark.slow
def test_ranks_train_together_after_one_has_compiled_something_else(ranks: Ranks) -> None:
    found = ranks.run(2, train_after_other_compilations, deadline=120)
    model = build(Residual)
    optimizer = sgd(model)
    for step in range(6):
        for rank in range(2):
            (model.loss(batch_of(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for params, _ in found:
            assert_close_relative(params[step], dict(model.named_parameters()), 2e-5, what="params")


def test_ranks_that_compile_different_graphs_are_told_the_first_difference(ranks: Ranks) -> None:
    swaps = {0: [False, False], 1: [False, True]}
    for rank, (message, seconds) in enumerate(ranks.run(2, run_forks, swaps, 25.0, {})):
        assert seconds < 25
        assert f"Ranks {rank} and {1 - rank} compiled graphs that gather different weights" in message
        assert "'forward: gather left.bias + right.bias as float32" in message, message
        assert "'forward: gather right.bias + left.bias as float32" in message, message


@pytest.mark.exhaustive  # see unit/compile/test_consensus.py
def test_a_rank_that_compiles_other_gathers_alone_is_told_who_is_missing(ranks: Ranks) -> None:
    swaps = {0: [False, False, False], 1: [False, False, True]}
    with pytest.raises(RankFailure, match=r"(?s)Rank 1 is about to run a newly compiled graph.*rank 0 did not reach"):
        ranks.run(2, run_and_raise, swaps, 5.0, {})


@pytest.mark.exhaustive  # see unit/compile/test_consensus.py
def test_a_late_rank_is_named(ranks: Ranks) -> None:
    swaps = {0: [False, False], 1: [False, False]}
    with pytest.raises(
        RankFailure, match=r"(?s)Rank 0 is about to run.*rank 1 did not reach.*raise consensus_timeout_s"
    ):
        ranks.run(2, run_and_raise, swaps, 1.0, {1: 6.0})


def run_and_raise(*args: Any) -> None:
    found = run_forks(*args)
    if found is not None:
        raise RankMismatchError(found[0])


def evaluate_other_parts() -> None:
    """Ranks also agree on weights of single graphs and on graphs of evaluation."""
    model = build(Forks)
    with engine_for(model, "aot_eager", gather_transport="collective") as engine:
        for step in range(4):
            with engine.train_step():
                loss = model(torch.ones(4 + dist.get_rank(), 9), step > 2).square().mean()
            loss.backward()
            engine.cycle.before_step()
            engine.eval_step()
            with torch.no_grad():
                model(torch.ones(2, 9), False)
        kinds = [plan.kind for plan in engine.session.plans.plan.graphs]
        assert kinds.count("backward") == 2


def test_all_graphs_are_agreed_on(ranks: Ranks) -> None:
    ranks.run(2, evaluate_other_parts)
