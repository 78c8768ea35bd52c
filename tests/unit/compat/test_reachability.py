"""What a half of a joint graph is made of."""

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.compiler import inductor_config
from lightning_zero.compat.reachability import does_more_in_a_copy, needed

aten = torch.ops.aten


def joint() -> dict[str, Node]:
    graph = Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    first = graph.call_function(aten.sin.default, (x,))
    unread = graph.call_function(aten.cos.default, (x,))
    drawn = graph.call_function(aten.rand.default, ([3],))
    written = graph.call_function(aten.add_.Tensor, (first, 1))
    gradient = graph.call_function(aten.mul.Tensor, (first, tangent))
    graph.output((first, gradient))
    return {"x": x, "tangent": tangent, "first": first, "unread": unread, "drawn": drawn, "written": written,
            "gradient": gradient}  # fmt: skip


def test_a_half_has_what_is_read_and_what_does_more_than_it_returns() -> None:
    nodes = joint()
    graph = nodes["x"].graph
    kept = needed(graph, [nodes["x"]], [nodes["first"]], "forward", Node.is_impure)
    assert kept == [nodes["first"], nodes["drawn"], nodes["written"]], "a write is forward's unless it says otherwise"
    with inductor_config.patch(fallback_random=False):
        kept = needed(graph, [nodes["first"], nodes["tangent"]], [nodes["gradient"]], "backward", lambda node: False)
    assert kept == [nodes["gradient"]]


def test_a_half_that_reads_what_it_cannot_make_is_left_to_torch() -> None:
    nodes = joint()
    assert needed(nodes["x"].graph, [nodes["x"]], [nodes["gradient"]], "forward", Node.is_impure) is None


def test_unread_numbers_are_drawn_where_nobody_traces() -> None:
    assert does_more_in_a_copy()(joint()["drawn"])
    assert not does_more_in_a_copy()(joint()["unread"])
