"""No whole weight lives from forward to backward.

Memory grows with the shards of a model, not with its weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from tests.helpers.memory import allocations
from tests.helpers.models import Batch, Case, build
from tests.helpers.sharded import EAGER, engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

bf16_autocast = partial(torch.autocast, "cpu", torch.bfloat16)


class Views(Case):
    """Weights that are viewed, cut, copied and cast before they are used.

    No activation has the size of one or a part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(23, 29)
        self.packed = nn.Parameter(torch.randn(3 * 29, 29) * 0.1)
        self.turned = nn.Parameter(torch.randn(29, 31) * 0.1)
        self.copied = nn.Parameter(torch.randn(31, 31) * 0.1)
        self.sliced = nn.Parameter(torch.randn(37, 62) * 0.1)
        self.flat = nn.Parameter(torch.randn(41 * 37) * 0.1)
        self.norm = nn.LayerNorm(41)
        self.last = nn.Linear(41, 43)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), torch.randn(n, 43, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        q, k, v = self.packed.chunk(3)
        x = torch.tanh(F.linear(x, q) * F.linear(x, k) + F.linear(x, v))
        x = torch.tanh(x @ self.turned)
        x = torch.tanh(F.linear(x, self.copied.t().contiguous()))
        x = torch.tanh(F.linear(x, self.sliced[:, ::2]))
        x = torch.tanh(F.linear(x, self.flat.view(41, 37)))
        return self.last(self.norm(x))


PARTS = {29 * 29, 37 * 31}


def gathered_from(node: Any) -> bool:
    """Return True if a node is a gathered weight, or a view, copy or part of one."""
    while isinstance(node, Node) and node.op == "call_function":
        if "lightning_zero.gather" in str(node.target):
            return True
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return False
        node = inputs[0]
    return False


def crossings(autocast: bool, tagged: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "forward": 0,
        "backward": 0,
        "saved": [],
        "received": [],
        "last": [],
        "gathers in backward": 0,
    }
    model = build(Views)
    # The last weight of forward and first of backward stays. No other weight has its size.
    last = model.last.weight.numel()
    sizes = {param.numel() for param in model.parameters() if param.numel() > 100} | PARTS

    def observe(what: str, graph: Graph) -> None:
        if what != "after":
            return
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        outputs = next(node for node in graph.nodes if node.op == "output").args[0]
        if any("tangents" in node.name for node in inputs):
            found["backward"] += 1
            found["gathers in backward"] += sum("lightning_zero.gather" in str(node.target) for node in graph.nodes)
            for node in inputs:
                if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].numel() in sizes:
                    kind = "last" if node.meta["val"].numel() == last else "received"
                    found[kind].append(f"{node.name} {tuple(node.meta['val'].shape)}")
        else:
            found["forward"] += 1
            found["saved"] += [
                str(node) for node in outputs if gathered_from(node) and node.meta["val"].numel() != last
            ]

    untagged = patch("lightning_zero.compile.backend.tag_gathers", lambda graph, *options: graph)
    # Seven samples: no activation of theirs has a weight's size.
    batches = [Views.make_batch(0, 7 * torch.distributed.get_world_size())] * 2
    with nullcontext() if tagged else untagged, engine_for(model, "aot_eager", observe, small_bytes=0) as engine:
        context = bf16_autocast if autocast else nullcontext
        train_sharded(engine, model, batches, sgd(model), context=context)
        shards = {record.layout.shard_numel for record in engine.sharder.live}
        assert not shards & sizes
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.exhaustive_variants("fp32")
def test_no_gathered_weight_crosses_from_forward_to_backward(ranks: Ranks, autocast: bool) -> None:
    """In generated code neither: see test_checkpointing.py."""
    out = ranks.run(2, crossings, autocast, True)[0]
    assert (out["forward"], out["backward"]) == (1, 1)
    assert out["saved"] == []
    assert out["received"] == []
    assert len(out["last"]) == 1
    assert out["gathers in backward"] > 0


def test_without_tags_gathered_weights_do_cross(ranks: Ranks) -> None:
    """The test above can fail."""
    out = ranks.run(2, crossings, False, False)[0]
    assert len(out["saved"]) >= 5
    assert len(out["received"]) >= 5


class Parts(nn.Module):
    """Three graphs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(19, 19, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        x = self.c(torch.tanh(self.b(x)))
        torch._dynamo.graph_break()
        return self.d(torch.tanh(x)).square().mean()


def kept_of_parts() -> list[tuple[str, ...]]:
    model = build(Parts)
    with engine_for(model, small_bytes=0) as engine:
        for _ in range(3):
            with engine.train_step():
                loss = model(torch.ones(7, 19))
            loss.backward()
            engine.cycle.before_step()
        graphs = engine.session.plans.plan.graphs
        assert sum(graph.kind == "forward" for graph in graphs) == 3
        return [gather.weights for graph in graphs for gather in graph.gathers if gather.until == "backward"]


def test_of_several_graphs_only_the_last_keeps_its_last_weight(ranks: Ranks) -> None:
    """Weights kept by the others would live while the last one runs forward and backward."""
    assert ranks.run(2, kept_of_parts) == [[("d.weight",)]] * 2


WIDTH = 190  # a weight is large enough, even in bfloat16, to be gathered for itself


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@contextmanager
def leaks() -> Iterator[None]:
    """Remove the mechanisms that prevent weights from living on."""
    with (
        patch("lightning_zero.compile.backend.tag_gathers", lambda graph, *options: graph),
        patch("lightning_zero.compile.session.regather_saved_weights", lambda sharder, rest: nullcontext()),
    ):
        yield


def peaks(backend: str, layers: int, autocast: bool, steps: int, leaky: bool = False) -> list[float]:
    """Return the peaks of forward and backward of each step beyond the memory that remains, in full float32 weights."""
    context = bf16_autocast if autocast else nullcontext
    model = Deep(layers)
    found = []
    options = {"compute_dtype": torch.bfloat16 if autocast else None}
    with leaks() if leaky else nullcontext(), engine_for(model, backend, **options) as engine:
        optimizer = sgd(model)
        for _ in range(steps):
            with allocations() as seen:
                with engine.train_step(), context():
                    loss = model(torch.randn(2, WIDTH))
                loss.backward()
                del loss
                engine.cycle.before_step()
            optimizer.step()
            optimizer.zero_grad()
            most, left = seen.totals()
            found.append((most - left) / (4 * WIDTH * WIDTH))
    return found


FEW, MANY = 3, 11
GROWTH = 3.0  # weights; some room for memory that the measurement cannot see


@pytest.mark.parametrize(
    ("backend", "autocast"),
    [pytest.param("aot_eager", True, marks=pytest.mark.slow), (EAGER, False), (EAGER, True)],
    ids=["compiled-autocast", "eager-fp32", "eager-autocast"],
)
def test_the_peak_of_a_step_does_not_grow_with_the_number_of_layers(ranks: Ranks, backend: str, autocast: bool) -> None:
    few, many = (min(ranks.run(2, peaks, backend, layers, autocast, 5)[0][2:]) for layers in (FEW, MANY))
    assert many - few < GROWTH
    assert many < 4 + GROWTH


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_the_peak_of_the_first_step_does_not_grow_with_the_number_of_layers(ranks: Ranks, autocast: bool) -> None:
    """It runs eagerly in any case, so its memory must fit."""
    few, many = (min(ranks.run(2, peaks, EAGER, n, autocast, 1)[0][0] for _ in range(2)) for n in (FEW, MANY))
    assert many - few < GROWTH


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.slow), EAGER])
@pytest.mark.exhaustive_variants("aot_eager")
def test_without_precautions_the_peak_does_grow(ranks: Ranks, backend: str) -> None:
    """The tests above can fail."""
    few, many = (min(ranks.run(2, peaks, backend, layers, False, 4, True)[0][2:]) for layers in (FEW, MANY))
    assert many - few > MANY - FEW - GROWTH
