"""Which activations a user's policy is asked about, and what its answers become."""

import torch
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compile.tagging import tag_activations, tag_gathers
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def joint() -> Graph:
    b = Builder()
    shard, x, g = b.shard("s", 64), b.input("x", 4, 8), b.input("tangents_1", 4, 8)
    y = b.call(aten.mm.default, x, b.gather(shard, 8, 8))
    y.meta["nn_module_stack"] = {
        "a": ("L['module']", object),
        "b": ("L['module']._modules['net']._modules['0']", object),
    }
    hidden = b.call(aten.relu.default, y)
    dropped = b.call(aten.bernoulli.default, hidden)
    return b.done(dropped, b.call(aten.mul.Tensor, g, hidden))


def test_the_policy_is_asked_about_activations_only() -> None:
    asked: list[tuple[str, int, str]] = []

    def policy(op: str, size: int, path: str) -> bool | None:
        asked.append((op, size, path))
        return None

    graph = tag_activations(tag_gathers(joint()), policy)
    # Not about weights, which have their tags; random ops, which would draw again; and what backward computes.
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
