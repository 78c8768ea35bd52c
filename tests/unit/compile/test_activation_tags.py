"""Which activations a user's policy is asked about, and what its answers become."""

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import NN_MODULE_STACK
from lightning_zero.compile.partitioner.partition import _module_path, tag_activations, tag_gathers
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def joint(called_in: str = "L['module'].net.0") -> Graph:
    b = Builder()
    shard, x, g = b.shard("s", 64), b.input("x", 4, 8), b.input("tangents_1", 4, 8)
    y = b.call(aten.mm.default, x, b.gather(shard, 8, 8))
    y.meta["nn_module_stack"] = {
        "a": ("L['module']", object),
        "b": (called_in, object),
    }
    hidden = b.call(aten.relu.default, b.call(aten._unsafe_view.default, y, [4, 8]))
    dropped = b.call(aten.bernoulli.default, hidden)
    return b.done(dropped, b.call(aten.mul.Tensor, g, hidden))


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['module']", ""),
        ("G['module'].net.0", "net.0"),
        ("L['module']._modules['net']._modules['0']", "net.0"),
        ("getattr(L['module'].net, '0')", "net.0"),
        ("getattr(getattr(L['module'].net, '0'), '1').act", "net.0.1.act"),
    ],
)
def test_modules_are_called_what_they_are_called_in_named_modules(written: str, path: str) -> None:
    asked: list[str] = []
    tag_activations(tag_gathers(joint(written)), lambda op, size, path: asked.append(path))
    assert asked[0] == path


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(getattr(self.layers, "0")(x))


def test_the_compiler_writes_paths_that_are_read() -> None:
    module, stacks = Nested(), []

    def backend(graph: GraphModule, inputs: object) -> GraphModule:
        stacks.extend(node.meta[NN_MODULE_STACK] for node in graph.graph.nodes if NN_MODULE_STACK in node.meta)
        return graph

    torch.compile(lambda x: module(x), backend=backend)(torch.ones(2, 3))
    node = Graph().placeholder("x")
    found = set()
    for node.meta[NN_MODULE_STACK] in stacks:
        found.add(_module_path(node))
    assert found == {"layers.0", "layers.1", "last.0", "last.1"}


def test_the_policy_is_asked_about_activations_only() -> None:
    asked: list[tuple[str, int, str]] = []

    def policy(op: str, size: int, path: str) -> bool | None:
        asked.append((op, size, path))
        return None

    graph = tag_activations(tag_gathers(joint()), policy)
    # Not about weights, which have their tags; views; random ops, which would draw again; and what backward computes.
    assert asked == [("aten.mm.default", 4 * 8 * 4, "net.0"), ("aten.relu.default", 4 * 8 * 4, "")]
    tagged = [node.name for node in graph.nodes if "recompute" in node.meta]
    assert tagged == ["gather_default"]


def test_its_answers_become_tags() -> None:
    graph = tag_activations(tag_gathers(joint()), lambda op, size, path: "relu" in op)
    tags = {node.name: node.meta.get("recompute") for node in graph.nodes}
    assert tags["relu_default"] is CheckpointPolicy.MUST_RECOMPUTE
    assert tags["mm_default"] is CheckpointPolicy.MUST_SAVE
    assert tags["gather_default"] is CheckpointPolicy.MUST_RECOMPUTE
    assert tags["bernoulli_default"] is None
    assert tags["mul_tensor"] is None
