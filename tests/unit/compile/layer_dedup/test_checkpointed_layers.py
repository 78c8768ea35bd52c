"""Checkpointed layers are deduplicated, and each is a region of its own in the joint graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_zero.compat.graphs import CHECKPOINT_POLICY_HASH, EXAMPLE_VALUE
from lightning_zero.compile.layer_dedup import dedup_layers, joint_tracer
from lightning_zero.compile.layer_dedup.layer_call import forward
from lightning_zero.compile.layer_dedup.layer_graph import RegionIds
from lightning_zero.compile.layer_dedup.matching import find_undescribed
from tests.unit.compile.layer_dedup.modules import (
    LAYERS,
    WIDTH,
    Batched,
    Bending,
    Block,
    InPlace,
    Stack,
    joint_graph,
    same_graph,
)

aten = torch.ops.aten
PLAINLY = partial(checkpoint, use_reentrant=False)

Saves = Callable[..., CheckpointPolicy]


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def activations(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is aten.gelu.default else CheckpointPolicy.PREFER_RECOMPUTE


def saving(policy: Saves) -> Callable[..., Any]:
    return partial(PLAINLY, context_fn=partial(create_selective_checkpoint_contexts, policy))


class Checkpointed(Stack):
    """Layers are called in the order of ``calls``."""

    def __init__(self, *calls: Callable[..., Any], block: type[Block] = Block, layers: int = LAYERS) -> None:
        super().__init__(block)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.calls = calls or (PLAINLY,)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.inner(x), self.bias.tanh()
        for number, layer in enumerate(self.layers):
            x = self.calls[number % len(self.calls)](layer, x, bias)
        return self.last(x).sum()


class Between(Checkpointed):
    """Regions of other kinds are before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = PLAINLY(lambda x: self.first(x).sin(), x)
        for layer in self.layers:
            x = PLAINLY(layer, x)
        return PLAINLY(lambda x: self.end(x).cos(), x).sum()


class Inside(Block):
    """Checkpoint a part of the layer."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(PLAINLY(lambda x: F.gelu(self.wide(self.norm(x))), x))


class Handing(Checkpointed):
    """Each layer also returns its input, as T5's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.inner(x), self.bias.tanh()
        for layer in self.layers:
            x, bias = PLAINLY(lambda layer, x, bias: (layer(x) * bias.sum(), bias), layer, x, bias)
        return x.sum()


class Editing(Block):
    """Mutate the input."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x.mul_(2)
        return x + self.narrow(F.gelu(self.wide(x)))


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Between, LAYERS),
        # A layer in a region and one outside of all regions are one kind together.
        pytest.param(
            lambda: Checkpointed(PLAINLY, lambda layer, x, bias: layer(x), layers=2 * LAYERS),
            LAYERS,
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: Checkpointed(saving(products)), LAYERS, marks=pytest.mark.slow),
        pytest.param(lambda: Checkpointed(partial(checkpoint, use_reentrant=True)), LAYERS, marks=pytest.mark.slow),
        pytest.param(lambda: Checkpointed(block=Inside), LAYERS, marks=pytest.mark.slow),  # regions in regions
        pytest.param(lambda: Checkpointed(block=Bending), LAYERS, marks=pytest.mark.exhaustive),
        pytest.param(lambda: Checkpointed(block=InPlace), LAYERS, marks=pytest.mark.exhaustive),
        pytest.param(lambda: Checkpointed(block=Batched), 0, marks=pytest.mark.exhaustive),
        pytest.param(lambda: Checkpointed(block=Editing), 0, marks=pytest.mark.slow),
        pytest.param(lambda: Stack(Inside), LAYERS, marks=pytest.mark.slow),
    ],
    ids=[
        "among regions of other kinds",
        "every second layer",
        "products saved",
        "reentrant",
        "regions in regions",
        "functions with derivatives",
        "edits of its own",
        "edits of buffers",
        "edits of what comes in",
        "a part of each layer",
    ],
)
@pytest.mark.exhaustive_variants(
    "every second layer", "products saved", "regions in regions", "edits of what comes in", "a part of each layer"
)
def test_the_joint_graph_is_that_of_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    assert any("PREFER_RECOMPUTE" in line for line in same_graph(make(), count))


@pytest.mark.exhaustive
def test_what_a_region_only_hands_on_keeps_no_layer_from_being_traced_once() -> None:
    module = Handing()
    whole, _ = joint_graph(module, False)
    once, found = joint_graph(module, True)
    assert found >= LAYERS - 1  # Dynamo may let the last one return more
    assert sorted(once) == sorted(whole)  # each layer's part of the bias' gradient is added after the layer


def kinds(*calls: Callable[..., Any], layers: int) -> list[str]:
    """Return the layer calls for each deduplicated layer."""
    found: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        if dedup_layers(graph, joint_tracer("aot_eager")) is not None:
            found.extend(str(node.args[0]) for node in graph.graph.nodes if node.target is forward())
        return lambda *args: (torch.zeros(()),)

    torch.compiler.reset()
    torch.compile(Checkpointed(*calls, layers=layers), backend=backend)(torch.randn(3, 6, WIDTH, requires_grad=True))
    return found


def test_regions_of_which_users_save_other_parts_are_other_kinds() -> None:
    first = kinds(*[saving(products)] * 3, *[saving(activations)] * 3, layers=6)
    assert [first.count(kind) for kind in first] == [3] * 6
    assert first[0] != first[3]
    # A policy's code may differ in another process, and cached code was compiled for this one.
    again = kinds(*[saving(products)] * 3, *[saving(activations)] * 3, layers=6)
    assert not set(first) & set(again)


def test_a_policy_that_has_a_name_for_caches_is_called_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> Any:
        return create_selective_checkpoint_contexts(products)

    once = kinds(partial(PLAINLY, context_fn=named), layers=3)
    setattr(named, CHECKPOINT_POLICY_HASH, "products")
    first, again = (kinds(partial(PLAINLY, context_fn=named), layers=3) for _ in range(2))
    assert len(once) == len(first) == 3
    assert first == again != once
    setattr(named, CHECKPOINT_POLICY_HASH, "others")
    assert not set(kinds(partial(PLAINLY, context_fn=named), layers=3)) & set(first)


def test_why_a_region_is_traced_by_itself_is_told_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    def told(layers: int) -> list[str]:
        caplog.clear()
        kinds(PLAINLY, layers=layers)
        return [record.getMessage() for record in caplog.records if record.name.startswith("lightning_zero")]

    caplog.set_level("DEBUG", "lightning_zero.compile.layer_dedup")
    assert len([line for line in told(2) if "is traced alone" in line]) == 2  # too few
    assert told(3) == ["Layer deduplication: 3 layers are differentiated as 1"]


def test_a_call_that_no_text_describes_is_found() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(torch.sin, (x,))
    odd = graph.call_function(kinds, (plain,))
    for node in (x, plain, odd):
        node.meta[EXAMPLE_VALUE] = torch.ones(2)
    assert find_undescribed([x, plain]) is None
    assert find_undescribed(graph.nodes) is odd


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_regions_grow_as_where_each_is_traced(seed: int) -> None:
    random = Random(seed)
    numbers, traced, given = RegionIds(), random.randint(2, 50), []
    for _ in range(12):
        if random.random() < 0.5:  # one layer of a kind, with one to three regions; these were traced before
            own = random.sample(range(1, 40), random.randint(1, 3))
            renamed = numbers.of_layer(own)
            assert sorted(renamed) == sorted(own)
            given += [renamed[number] for number in sorted(own)]
        else:
            traced += random.randint(1, 3)
            given.append(numbers.of(traced))
            assert numbers.of(traced) == given[-1]  # the number of each node of the region
    assert given == sorted(set(given))
    assert given[0] > 1  # greater than that of nodes outside of regions


def test_numbers_stay_where_no_layer_was_traced_once() -> None:
    numbers = RegionIds()
    assert [numbers.of(number) for number in (7, 9, 8, 30)] == [7, 9, 8, 30]
