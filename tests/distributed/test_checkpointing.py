"""Activation checkpointing as users write it.

One graph, every weight planned, and only the requested values saved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from tests.helpers.checkpointed import TRANSFORMERS, WAYS, WRAPPED
from tests.helpers.marks import how_seldom
from tests.helpers.models import build
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

ALL = WAYS | TRANSFORMERS
STEPS, SAMPLES = 3, 8
# By function and by wrapper, reentrant and not, and two regions that read one weight; the others vary these.
QUICK = ("checkpoint", "weights of two regions")
EXHAUSTIVE = ("checkpoint_wrapper", "reentrant checkpoint_wrapper", "products saved", "regions that end in a view")
LAYERS = ("blocks.", "layers.", ".h.")  # in the names of their weights
NORMS = ("norm.", ".ln_")  # whose weights may stay, being small


@dataclass
class Seen:
    """One training.

    Attributes:
        kinds: of the graphs that ran.
        gathered: names of the weights in the forward's plan.
        again: in the backward's.
        reduced: in the backward's, too.
        ahead: whether something is computed between the start of each of the backward's gathers and its first use.
        saved: bytes that its backward is given.
        weights: those of them that are whole weights.
    """

    out: Reference
    names: set[str]
    kinds: list[str]
    gathered: set[str]
    again: set[str]
    reduced: set[str]
    ahead: bool
    saved: int
    weights: list[str]


def _plain(names: Iterable[str]) -> set[str]:
    """Without wrappers, which torch 2.11 alone keeps in the names that a plan has."""
    return {name.replace(WRAPPED, "") for name in names}


def train(case: Any, backend: str, **options: Any) -> Seen:
    model = build(case)
    saved, weights = 0, []
    shapes = {tuple(param.shape) for param in model.parameters() if param.dim() > 1}

    def observe(what: str, graph: Graph) -> None:
        nonlocal saved
        inputs = graph.find_nodes(op="placeholder")
        if what != "after" or not any("tangents" in node.name for node in inputs):
            return
        for node in inputs:
            value = node.meta.get("val")
            if node.name.startswith(("primals", "tangents", "rng_state")):  # the last one's size is a symbol
                continue
            if isinstance(value, Tensor):
                saved += value.numel() * value.dtype.itemsize
                if tuple(value.shape) in shapes or tuple(value.shape)[::-1] in shapes:
                    weights.append(f"{node.name} {tuple(value.shape)}")

    torch._dynamo.reset()
    names = _plain(name for name, _ in model.named_parameters())
    with engine_for(model, backend, observe, **{"gather_group_mb": 0.02, "compile_dynamic": False} | options) as engine:
        out = train_sharded(engine, model, [model.make_batch(step, SAMPLES) for step in range(STEPS)], sgd(model))
        graphs = engine.session.plans.plan.graphs
    kinds = [graph.kind for graph in graphs]
    gathers = {
        kind: _plain(name for graph in graphs if graph.kind == kind for one in graph.gathers for name in one.weights)
        for kind in ("forward", "backward")
    }
    backward = [graph for graph in graphs if graph.kind == "backward"]
    reduced = _plain(name for graph in backward for reduce in graph.reduces for name in reduce.weights)
    ahead = all(gather.started + 1 < gather.waited for graph in backward for gather in graph.gathers)
    return Seen(out, names, kinds, gathers["forward"], gathers["backward"], reduced, ahead, saved, weights)


def train_both(way: str, backend: str) -> tuple[Seen, Seen]:
    """As users checkpoint it, and without, where code that is generated would show nothing else."""
    checkpointed, plain = ALL[way]
    return train(checkpointed, backend), train_plain(plain, "aot_eager")


@cache
def train_plain(case: Any, backend: str) -> Seen:
    return train(case, backend)


@cache
def expected(way: str, world: int) -> Reference:
    """One process, uncompiled, nothing checkpointed."""
    plain = ALL[way][1]
    batches = [plain.make_batch(step, SAMPLES) for step in range(STEPS)]
    return train_reference(build(plain), batches, sgd, world=world)


def unwrapped(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name.replace(WRAPPED, ""): value for name, value in step.items()} for step in steps]


def check(way: str, world: int, mine: Seen, plain: Seen) -> None:
    reference = expected(way, world)
    assert_close_relative(mine.out.losses, reference.losses, 1e-5, what="losses")
    for what in ("grads", "params"):
        assert_close_relative(unwrapped(getattr(mine.out, what)), getattr(reference, what), 2e-5, what=what)
    assert mine.kinds == ["forward", "backward"]
    assert mine.gathered == mine.reduced == mine.names
    matrices = {name for name in mine.gathered if name.endswith("weight") and not any(norm in name for norm in NORMS)}
    in_layers = {name for name in matrices | plain.again if any(part in name for part in LAYERS)}
    assert mine.again >= in_layers > set()
    assert mine.ahead
    assert mine.saved < plain.saved
    # The one that forward needs last and backward first stays, as without checkpointing.
    assert len(mine.weights) <= max(len(plain.weights), 1)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=how_seldom(way, QUICK, EXHAUSTIVE)) for way in WAYS],
)
def test_checkpointed_regions_are_planned_and_save_no_more(ranks: Ranks, way: str) -> None:
    for mine, plain in ranks.run(2, train_both, way, "aot_eager", deadline=240):
        check(way, 2, mine, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", TRANSFORMERS)
def test_models_of_transformers(ranks: Ranks, way: str) -> None:
    """By one rank: the plan is the same, and they take long to compile."""
    pytest.importorskip("transformers")
    ((mine, plain),) = ranks.run(1, train_both, way, "aot_eager", deadline=400)
    check(way, 1, mine, plain)


@pytest.mark.exhaustive
def test_with_generated_code(ranks: Ranks) -> None:
    way = "regions that end in a view"  # which torch's partitioner would chain to one
    for mine, plain in ranks.run(1, train_both, way, "inductor", deadline=600):
        check(way, 1, mine, plain)
