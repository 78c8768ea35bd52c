"""What a forward graph saves of an input that it edits is a copy, made before the edit."""

import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.fx_utils import results
from lightning_zero.compile.partitioner.partition import save_mutated_buffers
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def built(returns: str, edits: bool = True) -> Graph:
    """Of a batch and a buffer, which is read, multiplied, and takes the product."""
    graph = Builder()
    x, buffer = graph.input("primals_1", 3, 5), graph.input("primals_2", 3, 5)
    values = {"x": x, "buffer": buffer, "turned": graph.call(aten.t.default, buffer)}
    values["product"] = graph.call(aten.mul.Tensor, x, buffer)
    if edits:
        graph.call(aten.copy_.default, buffer, values["product"])
    return graph.done(*(values[name] for name in returns.split()))


def run(graph: Graph) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Results, where the batch holds twos and the buffer threes; and the buffer."""
    buffer = torch.full((3, 5), 3.0)
    out = GraphModule({}, graph)(torch.full((3, 5), 2.0), buffer)
    return [value.clone() for value in out], buffer


def values_of(returns: str) -> list[float]:
    graph = built(returns)
    assert save_mutated_buffers(graph, 1) == 1
    graph.lint()
    out, buffer = run(graph)
    assert buffer.unique().tolist() == [6.0], "the edit is made as before"
    return [value.unique().item() for value in out]


def test_an_edited_input_is_saved_as_it_was() -> None:
    assert values_of("product buffer x") == [6.0, 3.0, 2.0]


def test_so_is_a_view_of_it() -> None:
    assert values_of("product turned") == [6.0, 3.0]


def test_whoever_calls_the_graph_is_given_the_buffer_itself() -> None:
    graph = built("buffer buffer")
    assert save_mutated_buffers(graph, 1) == 1
    returned, saved = results(graph)
    assert returned.name == "primals_2"
    assert saved is not returned


def test_nothing_is_copied_that_no_backward_reads_or_nobody_edits() -> None:
    for graph in (built("buffer product x"), built("product buffer turned", edits=False)):
        before = str(graph)
        assert save_mutated_buffers(graph, 1) == 0
        assert str(graph) == before


def test_a_copy_lies_in_memory_as_the_input_does() -> None:
    graph = Builder()
    buffer = graph.input("primals_1", 3, 8)
    buffer.meta["val"] = torch.empty(3, 8, device="meta")[:, :5]
    graph.call(aten.copy_.default, buffer, graph.call(aten.neg.default, buffer))
    done = graph.done(None, buffer)
    assert save_mutated_buffers(done, 1) == 1
    given = torch.ones(3, 8)[:, :5]
    _, saved = GraphModule({}, done)(given)
    node = results(done)[1]
    assert isinstance(node, Node)
    assert node.meta["val"].stride() == saved.stride() == (8, 1)
    assert (saved.unique().tolist(), given.unique().tolist()) == ([1.0], [-1.0])
