"""Trainings whose equal layers are differentiated once, and as often as there are layers, to the last bit."""

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import config as functorch_config
from torch import Tensor, nn
from torch.fx import Graph

from tests.helpers.checkpointed import DeepGPT2, T5Encoder
from tests.helpers.logs import logged
from tests.helpers.models import Case, Deep, build
from tests.helpers.oracle import Reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


class Dropping(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(layer, nn.Dropout(0.2)) for layer in self.layers[:4]))


def no_outline() -> Any:
    return patch("lightning_zero.compile.backend.dedup_layers", lambda *_: None)


def train(backend: str, dtype: torch.dtype | None, once: bool) -> tuple[Reference, list[str]]:
    batches = [Dropping.make_batch(step, 60) for step in range(3)]
    cast: Any = partial(torch.autocast, "cpu", dtype) if dtype is not None else nullcontext
    model = build(Dropping)
    torch.manual_seed(7)
    # Generated code is cut into pieces both times: those of graphs that are alike are compiled once.
    whole = not once and backend != "inductor"
    with (
        nullcontext() if once or whole else no_outline(),
        logged("lightning_zero.compile.layer_dedup") as lines,
        functorch_config.patch(enable_autograd_cache=False),
        engine_for(model, backend, compute_dtype=dtype, compile_whole_graphs=whole) as engine,
    ):
        record = train_sharded(engine, model, batches, sgd(model), context=cast)
        return record, [line for line in lines if "are differentiated as" in line]


def both(backend: str, dtype: torch.dtype | None) -> None:
    (once, lines), (each, none) = (train(backend, dtype, once) for once in (True, False))
    assert [line.split()[2:4] for line in lines] == [["3", "layers"]]  # of four: the first passes no gradient on
    assert not none
    assert once.losses == each.losses
    for grads, expected in zip(once.grads, each.grads, strict=True):
        for name, grad in grads.items():
            assert grad is not None
            assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize(
    ("world", "backend", "dtype"),
    [
        (1, "aot_eager", torch.bfloat16),
        pytest.param(2, "aot_eager", None, marks=pytest.mark.slow),
        pytest.param(1, "inductor", torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
    ids=["autocast", "float32, two ranks", "generated code"],
)
def test_layers_that_are_differentiated_once_train_to_the_last_bit(
    ranks: Ranks, world: int, backend: str, dtype: torch.dtype | None
) -> None:
    ranks.run(world, both, backend, dtype, deadline=400)


def train_checkpointed(case: type[Case], backend: str, once: bool) -> tuple[Reference, list[str], Any, int]:
    """The record, the lines about layers, the plan, and how many bytes backward is given."""
    saved = 0

    def observe(what: str, graph: Graph) -> None:
        nonlocal saved
        inputs = graph.find_nodes(op="placeholder")
        if what == "after" and any("tangents" in node.name for node in inputs):
            others = ("primals", "tangents", "rng_state")  # the last one's size is a symbol
            values = [node.meta.get("val") for node in inputs if not node.name.startswith(others)]
            saved += sum(value.numel() * value.itemsize for value in values if isinstance(value, Tensor))

    model = build(case)
    torch.compiler.reset()
    torch.manual_seed(7)
    instead = nullcontext() if once else no_outline()
    with (
        instead,
        logged("lightning_zero.compile.layer_dedup") as lines,
        engine_for(model, backend, observe, gather_group_mb=0.02, compile_dynamic=False) as engine,
    ):
        batches = [case.make_batch(step, 8) for step in range(2)]
        record = train_sharded(engine, model, batches, sgd(model))
        plans = [asdict(graph) for graph in engine.session.plans.plan.graphs]
    return record, [line for line in lines if "are differentiated as" in line], plans, saved


def unnamed(plan: Any) -> Any:
    """Nodes of equal layers are called otherwise where layers were put in place."""
    if isinstance(plan, dict):
        return {key: unnamed(value) for key, value in plan.items() if key not in ("before", "used")}
    return list(map(unnamed, plan)) if isinstance(plan, list | tuple) else plan


def checkpointed(case: type[Case], backend: str, layers: int, same_order: bool) -> None:
    (once, lines, plans, saved), (each, none, expected, saves) = (
        train_checkpointed(case, backend, once) for once in (True, False)
    )
    assert lines == [f"Layer deduplication: {layers} layers are differentiated as 1"]
    assert not none
    assert once.losses == each.losses
    for grads, wanted in zip(once.grads, each.grads, strict=True):
        assert {name for name, grad in grads.items() if grad is None or not torch.equal(grad, wanted[name])} == set()
    assert saved == saves > 0
    if same_order:
        assert unnamed(plans) == unnamed(expected)
    assert [[gather["weights"] for gather in graph["gathers"]] for graph in plans] == [
        [gather["weights"] for gather in graph["gathers"]] for graph in expected
    ]


@pytest.mark.exhaustive  # see unit/compile/layer_dedup/test_checkpointed_layers.py
@pytest.mark.parametrize(
    ("case", "layers", "same_order"),
    # T5's first layer makes a value that all read, and the last returns more; sums of its gradient follow layers.
    [(DeepGPT2, 3, True), (T5Encoder, 3, False)],
    ids=["GPT-2 with dropout", "T5's encoder"],
)
def test_layers_that_users_checkpoint_train_to_the_last_bit_and_save_as_much(
    ranks: Ranks, case: type[Case], layers: int, same_order: bool
) -> None:
    pytest.importorskip("transformers")
    ranks.run(1, checkpointed, case, "aot_eager", layers, same_order, deadline=400)
