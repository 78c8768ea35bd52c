"""Annotations and checks of Dynamo's graphs."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat.graphs import CUSTOM
from lightning_zero.compile.capture.dynamo_graph import check_weight_edits, has_collectives, last_read, tag_weights
from lightning_zero.compile.fx_utils import WEIGHT
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import load


def module_of(*targets: object, nested: nn.Module | None = None) -> GraphModule:
    graph = Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))  # type: ignore[arg-type]
    if nested is not None:
        value = graph.call_module("nested", (value,))
    graph.output((value,))
    root = nn.Module()
    if nested is not None:
        root.nested = nested
    return GraphModule(root, graph)


@pytest.mark.parametrize(
    "target",
    [torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce, collectives.all_reduce],
)
def test_collectives_in_a_graph_are_seen(target: object) -> None:
    assert has_collectives(module_of(torch.relu, target))
    assert has_collectives(module_of(torch.relu, nested=module_of(target)))


def test_our_own_ops_and_everything_else_are_none() -> None:
    own = torch.nn.functional.relu
    assert not has_collectives(module_of(own, operator.neg, torch.ops.aten.relu.default, nested=module_of(torch.sin)))


class Reads(nn.Module):
    """Read weights as sharded modules do."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(1, 16)) for _ in range(3))
        self.kind = kind

    def region(self, x: Tensor, name: str) -> Tensor:
        weight = torch.ops.lightning_zero.gather(getattr(self, name), [4, 4], torch.float32)
        if self.kind == "edited":
            weight.mul_(2)
        return x @ weight

    def both(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.region, x, "second", use_reentrant=False)
        return self.region(inner, "third")

    def forward(self, x: Tensor) -> Tensor:
        x = x @ torch.ops.lightning_zero.gather(self.first, [4, 4], torch.float32)
        return checkpoint(self.both, x, use_reentrant=self.kind == "reentrant").sin()


def seen_by_a_backend(module: nn.Module, look: Callable[[GraphModule, Any], Any]) -> Any:
    """Return the result of ``look`` for Dynamo's graph of a call and its inputs."""
    load()
    found: list[Any] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        found.append(look(graph, inputs))
        return lambda *args: (torch.zeros(2, 4),)  # no executor has these weights

    def call(x: Tensor) -> Tensor:  # as modules are compiled here
        return module._call_impl(x)

    torch._dynamo.reset()
    torch.compile(call, backend=backend, fullgraph=True)(torch.ones(2, 4, requires_grad=True))
    return found[0]


def named(graph: GraphModule, inputs: Any) -> tuple[list[str], list[str], Any]:
    names = tag_weights(graph, ())
    bodies = [part for part in graph.modules() if isinstance(part, GraphModule) and part is not graph]
    inside = [node for body in bodies for node in body.graph.nodes if "gather" in str(node.target)]
    check_weight_edits(graph)
    return names, sorted(node.meta[CUSTOM][WEIGHT] for node in inside), last_read(graph, inputs)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_weights_of_checkpointed_regions_have_their_names(kind: str) -> None:
    module = Reads(kind)
    names, inside, last = seen_by_a_backend(module, named)
    assert names == ["first", "second", "third"]
    assert inside == ["second", "third"]
    assert last is module.third


def refused(graph: GraphModule, inputs: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check_weight_edits(graph)
    return str(caught.value)


def test_edits_in_checkpointed_regions_are_refused() -> None:
    said = seen_by_a_backend(Reads("edited"), refused)
    assert "The weight 'second' is edited in place" in said
