"""Regions of activation checkpointing save what eager ones save."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lightning_zero.compat.compiler import aot_autograd, min_cut_partition
from lightning_zero.compile.partitioner.partition import OF_WEIGHTS, save_region_boundaries, tag_gathers
from lightning_zero.native import load
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
AGAIN, SAVE = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
LAYERS = 4


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, w).sin(), w.t())


def whole(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(layer, x, w, use_reentrant=False)


def reentrant(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(layer, x, w, use_reentrant=True)


def in_a_view(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x, w: layer(x, w).flatten(), x, w, use_reentrant=False).view_as(x)


def of_several_results(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x, w: layer(x, w).sort(1), x, w, use_reentrant=False)[0]


def part(x: Tensor, w: Tensor) -> Tensor:
    return x + checkpoint(layer, x.cos(), w, use_reentrant=False)


def partitioned(step: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[Node], list[Node]]:
    """What forward saves besides inputs, and the nodes of backward."""
    found: dict[str, list[Node]] = {}

    def split(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        save_region_boundaries(module.graph, set())
        return min_cut_partition(module, inputs, **kwargs)

    def noted(kind: str) -> Callable[..., Any]:
        def compiler(module: GraphModule, inputs: Sequence[Any]) -> Any:
            found[kind] = list(module.graph.nodes)
            return make_boxed_func(module.forward)

        return compiler

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = step(x, w)
        return x.sin().sum()

    load()
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=noted("forward"), bw_compiler=noted("backward"), partition_fn=split)
    weights = [torch.full((8, 32), 0.1 * index, requires_grad=True) for index in range(1, LAYERS + 1)]
    torch.compile(run, backend=backend, fullgraph=True)(torch.ones(4, 8, requires_grad=True), *weights).backward()
    inputs = [node for node in found["backward"] if node.op == "placeholder"]
    return [node for node in inputs if not node.name.startswith(("primals", "tangents"))], found["backward"]


@pytest.mark.parametrize("step", [whole, reentrant, in_a_view, of_several_results])
@pytest.mark.exhaustive_variants("whole", "in_a_view")
def test_each_region_is_computed_again_from_what_came_into_it(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    saved, backward = partitioned(step)
    # Of each region's two products, the first once more, and two derivatives of both; the last one's result is there.
    assert sum(node.target is aten.mm.default for node in backward) == LAYERS * (1 + 4)
    sizes = [node.meta["val"].numel() for node in saved]
    assert max(sizes) <= 32, f"{sizes}: nothing of the inside"
    # What sort() makes is needed, too: where its elements came from.
    assert len(saved) == LAYERS * (2 if step is of_several_results else 1)


def test_what_lies_between_regions_is_not_computed_from_the_first_on() -> None:
    saved, backward = partitioned(part)
    assert sum(node.target is aten.mm.default for node in backward) == LAYERS * (1 + 4)
    assert all(node.meta["val"].numel() == 32 for node in saved)


def tagged(node: Node, region: int) -> Node:
    node.meta |= {"ac_graph_id": region, "recompute": AGAIN}
    return node


def test_a_weight_that_two_regions_read_is_not_saved() -> None:
    """Torch saves whatever goes from one region into a later one."""
    b = Builder()
    shard, x, tangent = b.shard("primals_1"), b.input("primals_2", 8, 8), b.input("tangents_1", 8, 8)
    weight = tagged(b.gather(shard, 8, 8), 4)
    first = tagged(b.call(aten.mm.default, x, weight), 4)
    second = tagged(b.call(aten.mm.default, first, weight), 9)
    graph = b.done(second, b.reduce(b.call(aten.mm.default, tangent, weight), shard))
    tag_gathers(graph)
    assert weight.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert all(weight.meta["ac_graph_id"] >= user.meta["ac_graph_id"] for user in weight.users)
    assert weight.meta["ac_graph_id"] == OF_WEIGHTS
    assert first.meta["recompute"] is SAVE
    assert second.meta["recompute"] is AGAIN, "nothing but the caller wants it"


def test_what_only_derivatives_read_is_not_saved() -> None:
    """``detach()``, which derivatives put before what they save, belongs to no region."""
    b = Builder()
    x, tangent = b.input("primals_1", 8, 8), b.input("tangents_1", 8, 8)
    inside = tagged(b.call(aten.tanh.default, x), 3)
    noted = b.call(aten.detach.default, inside)
    out = tagged(b.call(aten.sin.default, inside), 3)
    graph = b.done(out, b.call(aten.mul.Tensor, tangent, noted))
    save_region_boundaries(graph, set())
    assert inside.meta["recompute"] is AGAIN


def test_a_graph_without_regions_is_left_alone() -> None:
    b = Builder()
    x = b.input("primals_1", 8, 8)
    graph = b.done(b.call(aten.sin.default, b.call(aten.tanh.default, x)))
    before = {node: dict(node.meta) for node in graph.nodes}
    save_region_boundaries(graph, set())
    assert {node: dict(node.meta) for node in graph.nodes} == before
