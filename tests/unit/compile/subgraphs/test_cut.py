"""Equal layers become equal subgraphs, and our ops run between them, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.fx_utils import is_reduce, is_start, ops
from lightning_zero.compile.subgraphs import Subgraph, SubgraphCache, cut, is_worth_cutting
from lightning_zero.compile.subgraphs.compile_subgraphs import _fingerprint
from lightning_zero.compile.subgraphs.cut import _assemble, choose_cut_points
from lightning_zero.compile.subgraphs.node_kinds import NodeKind, classify_nodes
from lightning_zero.compile.subgraphs.node_order import NodeOrder
from lightning_zero.compile.subgraphs.repeats import RepeatedRun
from tests.unit.compile.graphs import Builder, aten, products
from tests.unit.compile.subgraphs.graphs import WIDTH, layers


def cut_up(graph: Graph, parts: int = 4) -> list[Subgraph | Node]:
    steps = cut(graph, parts)
    assert steps is not None
    return steps


def kinds_of_pieces(graph: Graph, parts: int = 4) -> list[str]:
    module, number = GraphModule(torch.nn.Module(), graph), SubgraphCache().number
    return [_fingerprint(module, step, {}, number) for step in cut_up(graph, parts) if isinstance(step, Subgraph)]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("grads", [False, True])
def test_layers_are_alike_wherever_our_ops_stand_in_them(at: int, grads: bool) -> None:
    few, many = (kinds_of_pieces(layers(count, at, grads)) for count in (6, 16))
    assert len(set(many)) == len(set(few)) <= 6
    assert len(many) - len(few) >= 10
    assert set(many) == set(few)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_every_node_is_in_one_place(at: int) -> None:
    graph = layers(8, at, grads=True)
    kinds = classify_nodes(graph)
    inside = [node.name for step in cut_up(graph) if isinstance(step, Subgraph) for node in step.graph.nodes]
    for node in graph.nodes:
        if kinds[node] is NodeKind.COMPUTE:
            assert inside.count(node.name) - sum(node in step.inputs for step in pieces(graph)) == 1
    between = [step for step in cut_up(graph) if isinstance(step, Node)]
    assert set(between) >= {node for node in graph.nodes if kinds[node] is NodeKind.COMM}


def pieces(graph: Graph) -> list[Subgraph]:
    return [step for step in cut_up(graph) if isinstance(step, Subgraph)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_read_is_there(at: int) -> None:
    graph = layers(8, at, grads=True)
    there = set(graph.find_nodes(op="placeholder"))
    for step in cut_up(graph):
        reads = step.inputs if isinstance(step, Subgraph) else step.all_input_nodes
        assert there.issuperset(reads)
        there |= set(step.outputs) if isinstance(step, Subgraph) else {step}
    assert there.issuperset(next(iter(reversed(graph.nodes))).all_input_nodes)


def test_launches_and_gradients_stay_in_order() -> None:
    graph = layers(10, 1, grads=True)
    for ours in (is_start, is_reduce):
        after = [step for step in cut_up(graph) if isinstance(step, Node) and ours(step)]
        assert after == [node for node in graph.nodes if ours(node)]
        assert after


def test_a_group_is_launched_no_later_than_in_the_graph() -> None:
    graph = layers(8, 2)
    order = list(graph.nodes)
    done: set[Node] = set()
    for step in cut_up(graph):
        if isinstance(step, Subgraph):
            done |= {node for node in order if node.name in {inner.name for inner in step.graph.nodes}}
        elif is_start(step):
            late = [node for node in done if node.op == "call_function" and order.index(node) > order.index(step)]
            assert not [node for node in late if classify_nodes(graph)[node] is not NodeKind.VIEW]


def test_pieces_compute_what_the_graph_does() -> None:
    assert_computes_the_same(layers(7, 1))


def assert_computes_the_same(graph: Graph) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        node: 0.1 * torch.randn(node.meta["val"].shape, generator=generator)
        for node in graph.find_nodes(op="placeholder")
    }
    groups = {
        node: 0.1 * torch.randn(node.meta["val"].shape, generator=generator) for node in graph.nodes if is_start(node)
    }

    def run(nodes: list[Node], known: dict[Node, torch.Tensor]) -> None:
        for node in nodes:
            if node.op == "call_function":
                waits = node.all_input_nodes[0] in groups
                known[node] = (
                    groups[node]
                    if is_start(node)
                    else known[node.all_input_nodes[0]]
                    if waits
                    else (
                        node.target(*torch.fx.map_arg(node.args, known.__getitem__))  # type: ignore[operator]
                    )
                )

    whole = dict(values)
    run(list(graph.nodes), whole)
    known = dict(values)
    for step in cut_up(graph):
        if isinstance(step, Node):
            run([step], known)
        else:
            inner = dict(zip(step.graph.find_nodes(op="placeholder"), (known[n] for n in step.inputs), strict=True))
            run(list(step.graph.nodes), inner)
            results = next(iter(reversed(step.graph.nodes))).args[0]
            known.update(zip(step.outputs, (inner[n] for n in results), strict=True))  # type: ignore[union-attr]
    for result in next(iter(reversed(graph.nodes))).all_input_nodes:
        assert torch.equal(known[result], whole[result])
        assert whole[result].abs().max() > 0


def test_little_that_repeats_is_not_worth_it() -> None:
    assert is_worth_cutting(layers(8))
    assert not is_worth_cutting(products("abc"))
    assert not is_worth_cutting(layers(1))


def test_an_op_of_ours_amid_what_cannot_be_cut_keeps_a_graph_whole() -> None:
    graph = layers(8)
    output = next(iter(reversed(graph.nodes)))
    [x] = output.all_input_nodes
    with graph.inserting_before(output):
        read = graph.call_function(aten.sin.default, (x,))
        whole = graph.call_function(torch.ops.lightning_zero.gather.default, (read, [4, WIDTH], torch.float32))
        last = graph.call_function(aten.cos.default, (whole,))
    for node in (read, whole, last):
        node.meta["val"] = x.meta["val"]
    output.replace_input_with(x, last)
    assert is_worth_cutting(graph)
    assert cut(graph) is None


def convolutions(count: int, head: bool = False) -> Graph:
    b = Builder()
    x, weight, line = b.input("x", 2, 8, 8, 8), b.input("w", 8, 8, 1, 1), b.input("l", 8, 8)
    conv = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    if head:
        x = b.call(aten.convolution.default, x, weight, *conv)
    for _ in range(count):
        y = x if head else b.call(aten.convolution.default, x, weight, *conv)
        y = b.call(aten.mm.default, b.call(aten.view.default, y, [128, 8]), line)
        for op in (aten.relu, aten.neg, aten.abs, aten.sin, aten.cos, aten.exp):
            y = b.call(op.default, y)
        x = b.call(aten.view.default, y, [2, 8, 8, 8])
    return b.done(x)


def test_convolutions_in_layers_keep_a_graph_whole() -> None:
    assert not is_worth_cutting(convolutions(6))
    assert is_worth_cutting(convolutions(6, head=True))


def test_ranks_that_wait_for_each_other_keep_a_graph_whole() -> None:
    graph = layers(8)
    x = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(x):
        mine = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    mine.meta["val"] = x.meta["val"]
    x.replace_all_uses_with(mine, delete_user_cb=lambda user: user is not mine)
    assert not is_worth_cutting(graph)


def sunk(*order: str) -> list[str]:
    """A value made early and read late, after two products; names of compute nodes in the order of subgraphs."""
    b = Builder()
    x, w = b.input("x", WIDTH, WIDTH), b.input("w", WIDTH, WIDTH)
    early = b.call(aten.sin.default, x)
    one = b.call(aten.mm.default, x, w)
    two = b.call(aten.mm.default, one, w)
    if order:
        b.call(aten.copy_.default, x, one)
    b.done(b.call(aten.mul.Tensor, two, early))
    work = NodeOrder(b.graph, classify_nodes(b.graph)).work
    return [node.name for node in work]


def test_pointwise_work_is_done_right_before_it_is_read() -> None:
    assert sunk() == ["mm_default", "mm_default_1", "sin_default", "mul_tensor"]


def test_nothing_is_done_later_than_what_is_written_in_place() -> None:
    assert sunk("x is written to") == ["sin_default", "mm_default", "mm_default_1", "copy__default", "mul_tensor"]


def test_what_a_layer_makes_for_a_backward_alone_stands_in_the_layer() -> None:
    """Layer norms: autograd orders a division for backward after the loss, in one subgraph it would grow with the
    layers.
    """

    def saved(count: int) -> Graph:
        graph = layers(count)
        output = next(iter(reversed(graph.nodes)))
        results = output.all_input_nodes
        products = [node for node in graph.nodes if node.target is aten.mm.default]
        b = Builder()
        b.graph = graph
        with graph.inserting_before(output):
            views = [b.call(aten.view.default, node, [WIDTH, 4]) for node in products]
            halves = [b.call(aten.div.Tensor, view, 2.0) for view in views]
            last = [b.call(aten.neg.default, half) for half in halves]
        output.args = ((*results, *last),)
        return graph

    graph = saved(6)
    order = NodeOrder(graph, classify_nodes(graph))
    for node in graph.nodes:
        if node.target is aten.div.Tensor:
            assert order.place[node] == order.place[node.all_input_nodes[0].all_input_nodes[0]] + 1
            assert order.work[order.place[node] + 1].target is aten.neg.default
    assert set(kinds_of_pieces(saved(6))) == set(kinds_of_pieces(saved(16)))
    assert_computes_the_same(saved(6))


@pytest.mark.parametrize("how", ["read", "larger", "written", "kept"])
def test_other_work_stays_behind_the_last_layer(how: str) -> None:
    b = Builder()
    x, w = b.input("x", WIDTH, WIDTH), b.input("w", WIDTH, WIDTH)
    one = b.call(aten.mm.default, x, w)
    two = b.call(aten.mm.default, one, w)
    if how == "written":
        b.call(aten.copy_.default, one, two)
    wide = b.call(aten.expand.default, one, [4, WIDTH, WIDTH]) if how == "larger" else one
    last = b.call(aten.sin.default, wide)
    read = b.call(aten.mm.default, last, w) if how == "read" else last
    b.done(b.call(aten.mul.Tensor, two, two), read, one if how == "kept" else None)
    work = NodeOrder(b.graph, classify_nodes(b.graph)).work
    assert work.index(last) > work.index(two)


def test_what_draws_or_checks_has_a_place_of_its_own() -> None:
    b = Builder()
    b.input("x", 4)
    noise = b.call(aten.rand.default, [4], device=torch.device("meta"))
    mask = b.call(aten.full.default, [4], 1.0, device=torch.device("meta"))
    b.done(b.call(aten.mul.Tensor, noise, mask))
    kinds = classify_nodes(b.graph)
    assert (kinds[noise], kinds[mask]) == (NodeKind.COMPUTE, NodeKind.VIEW)


def test_what_was_moved_to_another_piece_finds_what_it_reads() -> None:
    """Pointwise nodes are sunk, and may then precede other nodes that they followed."""
    b = Builder()
    shard, host, x = b.shard("shard"), b.input("host", 8, 8), b.input("tangents_1", 8, 8)
    first = b.call(aten.mm.default, x, x)
    ours = torch.ops.lightning_zero
    start = b.graph.call_function(ours.reload_start.default, (host, shard))
    wait = b.graph.call_function(ours.reload_wait.default, (start, host, shard))
    start.meta["val"] = wait.meta["val"] = x.meta["val"]
    late, later = b.call(aten.relu.default, wait), b.call(aten.relu.default, first)
    third = b.call(aten.mm.default, first, late)
    graph = b.done(b.call(aten.mm.default, third, later))
    kinds = classify_nodes(graph)
    order = NodeOrder(graph, kinds)
    assert [order.place[node] for node in (first, late, third, later)] == [0, 1, 2, 3]
    assert order.between(graph)[wait] == 2
    steps = _assemble(graph, kinds, order.work, [0, 2, 5], order.between(graph))
    assert steps is not None
    assert steps[:2] == [start, wait]
    assert [isinstance(step, Subgraph) for step in steps] == [False, False, True, True]


LENGTH = 36
WRITTEN = 50_000  # bytes, of which a cut may add 50
MIDDLE = RepeatedRun(6, 26, 10)


class FakeOrder:
    """Order of this many nodes: ``lost`` returns the bytes that a cut adds at a position, None if impossible."""

    def __init__(
        self, lost: Callable[[int], float | None] = lambda place: 0, effort: Callable[[int], int] = lambda place: 1
    ) -> None:
        self.work = range(LENGTH)
        self._lost, self._effort = lost, effort

    def cut_points(self) -> list[int]:
        return [place for place in range(1, LENGTH) if self._lost(place) is not None]

    def lost(self) -> list[float]:
        return [self._lost(place) or 0 for place in range(LENGTH + 1)]

    def effort(self) -> list[int]:
        return [self._effort(place) for place in range(LENGTH)]

    def written(self) -> int:
        return WRITTEN


def chosen(
    order: Any, runs: Sequence[RepeatedRun] = (MIDDLE,), between: Sequence[int] = (), parts: int = 1
) -> list[int]:
    return choose_cut_points(order, runs, between, parts)


@pytest.mark.parametrize(
    ("parts", "seams"), [(1, [6, 16, 26]), (2, [6, 11, 16, 21, 26]), (5, [6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26])]
)
def test_each_repetition_is_cut_alike_into_equal_parts(parts: int, seams: list[int]) -> None:
    assert chosen(FakeOrder(), parts=parts) == seams


def test_parts_are_equal_in_effort_not_in_length() -> None:
    heavy = FakeOrder(effort=lambda place: 10 if place % 10 == 3 else 1)  # of 19, 7 are before it
    assert chosen(heavy, parts=2) == [6, 13, 16, 23, 26]


def test_a_repetition_that_is_cut_short_has_the_places_that_it_comes_to() -> None:
    assert chosen(FakeOrder(), [RepeatedRun(6, 31, 10)], parts=2) == [6, 11, 16, 21, 26, 31]
    assert chosen(FakeOrder(), [RepeatedRun(6, 30, 10)], parts=2) == [6, 11, 16, 21, 26]


def test_neither_end_is_a_seam() -> None:
    assert chosen(FakeOrder(), [RepeatedRun(0, 36, 12)]) == [12, 24]


@pytest.mark.parametrize(
    ("lost", "seams"),
    [
        ({9: 50, 4: 60}, [9, 19]),  # nearly nothing
        ({9: 50, 4: 40}, [9, 14, 19, 24]),
        ({9: 51, 4: 60}, [9, 19]),  # or as little as possible
        ({9: 61, 4: 60}, [14, 24]),
        ({8: 60, 9: 60}, [8, 18]),  # the first of equals
    ],
)
def test_a_seam_loses_next_to_nothing_or_as_little_as_can_be(lost: dict[int, int], seams: list[int]) -> None:
    assert chosen(FakeOrder(lambda place: lost.get(place % 10)), parts=3) == seams


def test_the_repetition_in_the_middle_stands_for_all() -> None:
    assert chosen(FakeOrder(lambda place: 0 if place in (19, 34) else 60), [RepeatedRun(6, 36, 10)]) == [9, 19, 29]


def test_where_there_can_be_no_seam_there_is_none() -> None:
    assert chosen(FakeOrder(lambda place: None), between=[3, 12, 30], parts=4) == []


def test_what_does_not_repeat_is_cut_before_what_runs_between() -> None:
    assert chosen(FakeOrder(), between=[0, 1, 3, 9, 25, 30]) == [1, 3, 6, 16, 26, 30]
    # At the nearest position before it that adds little.
    order = FakeOrder(lambda place: 0 if place in (1, 2, 4, 6, 16, 28, 31) else 1000)
    assert chosen(order, between=[3, 30]) == [2, 6, 16, 26, 28]


def test_between_two_runs_places_are_those_of_neither() -> None:
    runs = [RepeatedRun(0, 12, 6), RepeatedRun(20, 32, 6)]
    assert chosen(FakeOrder(), runs, between=[5, 15, 22, 34]) == [6, 12, 15, 20, 26, 32, 34]


def read_in_place(count: int) -> Graph:
    """Layers that scale a weight read in place, enqueue a gradient of it, and use the scaled weight afterwards.

    The scaling is a pointwise op, which moves to its first reader.
    """
    b = Builder()
    shards = [b.shard(f"w{i}", WIDTH * WIDTH) for i in range(count)]
    x, bias = b.input("x", WIDTH, WIDTH), b.input("bias", WIDTH)
    for shard in shards:
        weight = b.graph.call_function(ops("weight_view"), (shard, [WIDTH, WIDTH], torch.float32))
        weight.meta["val"] = torch.empty(WIDTH, WIDTH, device="meta")
        scaled = b.call(aten.mul.Tensor, weight, 2.0)
        grad = b.call(aten.mm.default, x, x)
        b.graph.call_function(ops("reduce_after_reads"), ([grad], [shard], [weight])).meta["val"] = None
        x = b.call(aten.relu.default, b.call(aten.add.Tensor, b.call(aten.mm.default, grad, x), bias))
        x = b.call(aten.mm.default, x, scaled)
    return b.done(x)


def test_gradients_follow_readers_of_their_weights_that_were_moved() -> None:
    graph = read_in_place(8)
    steps = cut_up(graph)
    assert len(pieces(graph)) > 8
    reduces = [step for step in steps if isinstance(step, Node) and is_reduce(step)]
    assert len(reduces) == 8
    for reduce in reduces:
        [view] = reduce.args[2]
        later = steps[steps.index(reduce) :]
        assert not [step for step in later if isinstance(step, Subgraph) and view in step.inputs]
