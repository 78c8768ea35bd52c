"""Compiled graphs whose forward and backward are replayed, emulated on a CPU.

The same books, without the graphs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as compiler_counters

from tests.helpers.marks import how_seldom
from tests.helpers.models import OneLayer, build
from tests.helpers.oracle import assert_close_relative
from tests.helpers.replays import ALONE, COPY, WAYS, graphs_are_cut, train, train_up_to_a_replayed_forward
from tests.helpers.sharded import adamw, engine_for
from tests.ranks.pool import Ranks


def both(way: str, **options: Any) -> tuple[Any, Any]:
    return train(way, "aot_eager", emulate_cuda_graph_model=True, **options), train(way, "aot_eager", **options)


# Each of the others varies one of these.
QUICK = (
    "accumulated, kept until the step",
    "dropout",
    "buffers",
    "a weight edited between",
    "modules one after another, accumulated",
    "a graph that is broken in two",
)
# Cases that other tests cover: test_replays_by_collectives.py, test_stages.py, test_grad_aliasing.py, and those here that
# accumulate, that zero gradients at first and drop them later, and whose sizes are others in each step.
ELSEWHERE = (
    *("clipped", "accumulated", "accumulated, stage 1", "modules one after another"),
    *("gradients zeroed, not dropped", "a smaller batch between", "gradients over copies"),
)
EXHAUSTIVE = (
    *("frozen weights, gradients dropped first, then added to", "a weight in two modules", "a frozen encoder"),
    *("sizes in turn", "another weight trained from then on"),
    *("called twice before a backward", "a module used twice, kept until backward", "a teacher", "heads in turn"),
    *("gradients added to first, then dropped", "activations checkpointed, by the reentrant way"),
    *("an evaluation between", "a weight in two modules, stage 1"),
)
EMULATED = [
    pytest.param(name, marks=how_seldom(name, QUICK, EXHAUSTIVE))
    for name, way in WAYS.items()
    if way.emulated and name not in ELSEWHERE
]


@pytest.mark.parametrize("way", EMULATED)
def test_replays_train_like_runs_and_count_like_them(ranks: Ranks, way: str) -> None:
    for (replayed, counters), (plain, expected) in ranks.run(2, both, way, deadline=120):
        if WAYS[way].twice:
            assert_close_relative(replayed.losses, plain.losses, 1e-3, what="losses")
            assert_close_relative(replayed.params, plain.params, 5e-3, what="weights")
        else:
            assert replayed.losses == plain.losses
            for mine, theirs in zip(replayed.params, plain.params, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        replays = counters.pop("replayed_graphs", 0)
        assert replays >= WAYS[way].replays if WAYS[way].replays else replays == 0
        same = ("gathers", "gather_bytes", "reduces", "agreements")
        if not graphs_are_cut(way):
            same += ("reduce_bytes", "flushes")
        assert {name: counters.get(name) for name in same} == {name: expected.get(name) for name in same}


@pytest.mark.parametrize("way", QUICK)
def test_replays_of_one_rank_train_like_runs(ranks: Ranks, way: str) -> None:
    """It reads weights in place, and reduces nothing."""
    [((replayed, counters), (plain, _))] = ranks.run(1, both, way, deadline=120, **ALONE)
    assert_close_relative(replayed.losses, plain.losses, 1e-6, what="losses")
    assert_close_relative(replayed.params, plain.params, 1e-6, what="weights")
    assert counters["replayed_graphs"] >= WAYS[way].replays > 0


def eight_lengths() -> tuple[int, list[int]]:
    """How many graphs were traced; how many had been replayed before each step."""
    torch._dynamo.reset()
    compiler_counters.clear()
    model, replayed = build(OneLayer), []
    with engine_for(model, "aot_eager", emulate_cuda_graph_model=True, **COPY) as engine:
        optimizer = adamw(model)
        for step in range(120):
            replayed.append(engine.executor.counters().get("replayed_graphs", 0))
            with engine.train_step(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model.loss(model.make_batch(step, 2 * (2 + step % 8)))
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        assert len(engine.session.plans.plan.graphs) == 2, "a forward and a backward"
    return compiler_counters["stats"]["unique_graphs"], replayed


def test_eight_lengths_are_compiled_twice_and_replayed_after_some_rounds(ranks: Ranks) -> None:
    for graphs, replayed in ranks.run(2, eight_lengths, deadline=120):
        assert graphs <= 2
        assert replayed[-1] - replayed[60] >= 0.9 * 2 * 59, "forward and backward of nine in ten steps"


def closed_before_its_backward() -> tuple[int, str]:
    """Return a captured forward, and the error of its backward when the engine is closed between the two."""
    model = build(OneLayer)
    with engine_for(model, "aot_eager", emulate_cuda_graph_model=True, **COPY) as engine:
        loss, replayed = train_up_to_a_replayed_forward(engine, model)
        engine.close()
        try:
            loss.backward()
        except RuntimeError as error:
            return replayed, str(error)
        return replayed, "nothing was said"


def test_a_backward_after_the_end_says_so(ranks: Ranks) -> None:
    for replayed, message in ranks.run(2, closed_before_its_backward, deadline=120):
        assert replayed == 5, "two steps and a forward"
        assert "before its backward pass. Run the backward pass first." in message


class Similarities(nn.Module):
    """Returns similarities, their transpose, as CLIP does, and a part of them without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 24), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.left(x) @ self.right(x).t()
        return found, found.t(), found[0].detach()


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Similarities()

    def loss(self, x: Tensor) -> Tensor:
        rows, columns, part = self.net(x)
        assert part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() == columns.data_ptr()
        target = torch.arange(len(rows))
        return nn.functional.cross_entropy(rows, target) + 3 * nn.functional.cross_entropy(columns, target) + part.sum()


def train_contrastive(replayed: bool) -> tuple[list[float], int]:
    torch.manual_seed(3)
    model, losses = Contrastive(), []
    with engine_for(model, emulate_cuda_graph_model=replayed) as engine:
        optimizer = adamw(model)
        for _ in range(6):
            with engine.train_step():
                loss = model.loss(torch.randn(8, 16))
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine.executor.counters().get("replayed_graphs", 0)


def contrastive_both() -> tuple[Any, Any]:
    return train_contrastive(True), train_contrastive(False)


def test_outputs_that_are_views_of_another_one_are_replayed(ranks: Ranks) -> None:
    [((losses, replayed), (expected, runs))] = ranks.run(1, contrastive_both, deadline=120)
    assert losses == expected
    assert replayed > 0
    assert not runs
