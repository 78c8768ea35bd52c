"""The loop over passes, their contracts and their traces."""

from unittest.mock import patch

import pytest
import torch
from torch.fx import Graph, Node

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.fx_utils import output_node
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec, default_passes, run_passes
from lightning_zero.compile.passes.base import PassTrace, check_contracts
from lightning_zero.compile.passes.prepare import split_gathers
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import Builder, order, products

aten = torch.ops.aten


def printed(graph: Graph) -> list[str]:
    """Return one short line per node: `mm = mm(x, wait_tensor)`."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {str(node.target).split('.')[1]}({', '.join(map(str, node.args))})")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    return lines


# -- split_gathers


def test_a_gather_becomes_a_start_and_a_wait_in_its_place() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    weight = b.gather(shard, 5, 6)
    first = b.call(aten.mm.default, x, weight)
    graph = b.done(first, weight)
    assert printed(graph) == [
        "gather_default = gather(shard, [5, 6], torch.float32)",
        "mm_default = mm(x, gather_default)",
        "return (mm_default, gather_default)",
    ]
    assert split_gathers(graph) is graph
    assert printed(graph) == [
        "gather_start_default = gather_start(shard, [5, 6], torch.float32)",
        "wait_tensor_default = wait_tensor(gather_start_default)",
        "mm_default = mm(x, wait_tensor_default)",
        "return (mm_default, wait_tensor_default)",
    ]
    graph.lint()


def test_each_gather_of_a_weight_is_split_by_itself_and_keeps_what_is_known_of_it() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 6, 6)
    graph = b.done(b.call(aten.mm.default, b.call(aten.mm.default, x, b.gather(shard, 6, 6)), b.gather(shard, 6, 6)))
    for node in graph.nodes:
        node.meta["recompute"] = "a tag for the partitioner, which is done"
        node.meta["stack_trace"] = f"of {node.name}"
    split_gathers(graph)
    starts = [n for n in graph.nodes if n.name.startswith("gather_start")]
    waits = [n for n in graph.nodes if n.name.startswith("wait_tensor")]
    assert len(starts) == len(waits) == 2
    for number, pair in enumerate(zip(starts, waits, strict=True)):
        for node in pair:
            assert node.meta["val"].shape == (6, 6)
            assert node.meta["stack_trace"] == ("of gather_default" if number == 0 else "of gather_default_1")
            assert "recompute" not in node.meta


def test_a_graph_without_weights_stays_as_it_is() -> None:
    b = Builder()
    x = b.input("x", 3, 3)
    graph = b.done(b.call(aten.mm.default, x, x))
    before = printed(graph)
    assert printed(split_gathers(graph)) == before
    assert printed(enqueue_gradients(graph)) == before


# -- enqueue_gradients


def test_a_gradient_is_handed_over_and_none_is_returned() -> None:
    b = Builder()
    shard, x, g = b.shard("shard"), b.input("x", 5, 8), b.input("g", 8, 6)
    grad = b.call(aten.mm.default, x, g)
    graph = b.done(b.reduce(grad, shard), g, None)
    assert printed(graph)[1:] == ["reduce_default = reduce(mm_default, shard)", "return (reduce_default, g, None)"]
    assert enqueue_gradients(graph) is graph
    assert printed(graph) == [
        "mm_default = mm(x, g)",
        "reduce_add_default = reduce_add(mm_default, shard)",
        "return (None, g, None)",
    ]
    graph.lint()


def test_a_handed_over_gradient_survives_dead_code_elimination() -> None:
    b = Builder()
    shard, g = b.shard("shard"), b.input("g", 4, 8)
    graph = enqueue_gradients(b.done(b.reduce(g, shard), None))
    graph.eliminate_dead_code()
    assert printed(graph) == ["reduce_add_default = reduce_add(g, shard)", "return (None, None)"]


def test_both_gradients_of_a_tied_weight_are_handed_over_and_their_sum_is_dropped() -> None:
    b = Builder()
    shard, g, h = b.shard("shard"), b.input("g", 4, 8), b.input("h", 4, 8)
    total = b.call(aten.add.Tensor, b.reduce(g, shard), b.reduce(h, shard))
    graph = enqueue_gradients(b.done(g, total))
    assert printed(graph) == [
        "reduce_add_default = reduce_add(g, shard)",
        "reduce_add_default_1 = reduce_add(h, shard)",
        "return (g, None)",
    ]


def test_gradients_of_a_weight_that_is_used_three_times_are_all_handed_over() -> None:
    b = Builder()
    shard, grads = b.shard("shard"), [b.input(name, 4, 8) for name in "gh"]
    once = b.reduce(grads[0], shard)
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, once, b.reduce(grads[1], shard)), b.reduce(grads[0], shard))
    graph = enqueue_gradients(b.done(total))
    assert [line.split(" = ")[1] for line in printed(graph)[:-1]] == [
        "reduce_add(g, shard)",
        "reduce_add(h, shard)",
        "reduce_add(g, shard)",
    ]
    assert printed(graph)[-1] == "return (None,)"


def test_a_gradient_that_is_returned_twice_is_handed_over_once() -> None:
    b = Builder()
    shard, g = b.shard("shard"), b.input("g", 4, 8)
    reduced = b.reduce(g, shard)
    assert printed(enqueue_gradients(b.done(reduced, reduced)))[-1] == "return (None, None)"


def test_widening_before_handing_over_is_left_to_the_executor() -> None:
    b = Builder()
    shard, g = b.shard("shard"), b.input("g", 4, 8, dtype=torch.bfloat16)
    wide = b.call(aten._to_copy.default, g, dtype=torch.float32)
    graph = enqueue_gradients(b.done(b.reduce(wide, shard)))
    assert printed(graph) == ["reduce_add_default = reduce_add(g, shard)", "return (None,)"]


def test_narrowing_before_handing_over_stays() -> None:
    b = Builder()
    shard, g = b.shard("shard", dtype=torch.bfloat16), b.input("g", 4, 8)
    narrow = b.call(aten._to_copy.default, g, dtype=torch.bfloat16)
    graph = enqueue_gradients(b.done(b.reduce(narrow, shard)))
    assert printed(graph)[1] == "reduce_add_default = reduce_add(_to_copy_default, shard)"


def test_a_widened_gradient_that_is_used_elsewhere_stays() -> None:
    b = Builder()
    shard, g = b.shard("shard"), b.input("g", 4, 8, dtype=torch.bfloat16)
    wide = b.call(aten._to_copy.default, g, dtype=torch.float32)
    graph = enqueue_gradients(b.done(b.reduce(wide, shard), wide))
    assert printed(graph)[-1] == "return (None, _to_copy_default)"
    graph.lint()


def test_a_use_of_a_reduced_gradient_that_no_pass_knows_is_an_error_not_a_wrong_gradient() -> None:
    b = Builder()
    shard, g, other = b.shard("shard"), b.input("g", 4, 8), b.input("other", 1, 32)
    mixed = b.call(aten.add.Tensor, b.reduce(g, shard), other)
    with pytest.raises(AssertionError, match=r"gradient reduce_default is used by \[add_tensor\]"):
        enqueue_gradients(b.done(mixed))


# -- contracts


def keep(graph: Graph) -> Graph:
    return graph


def spec(name: str, requires: str = "", provides: str = "", conflicts: str = "") -> PassSpec:
    return PassSpec(name, keep, *(frozenset(words.split()) for words in (requires, provides, conflicts)))


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([spec("b", requires="x")], r"Pass 'b' requires \['x'\], which no earlier pass provides\. Put one before it"),
        ([spec("b", requires="x"), spec("a", provides="x")], r"Pass 'b' requires \['x'\]"),
        ([spec("a", provides="x y"), spec("b", requires="x z w")], r"Pass 'b' requires \['w', 'z'\]"),
        ([spec("a", provides="x"), spec("b", conflicts="x")], r"Pass 'b' conflicts with \['x'\].*Remove one of them"),
        ([spec("a", requires="x", provides="x")], r"Pass 'a' requires \['x'\]"),
        ([*MINIMAL_PASSES, *MINIMAL_PASSES], r"Pass 'split_gathers' conflicts with \['started'\]"),
    ],
    ids=["nobody provides", "provided later", "two missing", "conflict", "not from itself", "split twice"],
)
def test_a_violated_contract_is_an_error_before_anything_runs(passes: list[PassSpec], words: str) -> None:
    ran: list[str] = []
    watched = [PassSpec(p.name, lambda g: ran.append("ran") or g, p.requires, p.provides, p.conflicts) for p in passes]
    with pytest.raises(ValueError, match=words):
        run_passes(Builder().done(), watched)
    assert not ran


def test_kept_contracts_are_accepted() -> None:
    check_contracts([spec("a", provides="x", conflicts="x"), spec("b", requires="x", provides="y"), spec("c", "x y")])
    for prefetch in (True, False):
        check_contracts(default_passes(PassContext(CompileConfig(prefetch=prefetch), 2)))


def test_a_pass_that_breaks_the_graph_is_noticed_at_once() -> None:
    def breaks(graph: Graph) -> Graph:
        gather = next(node for node in graph.nodes if node.name == "gather_default")
        output_node(graph).prepend(gather)  # after its use
        return graph

    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    graph = b.done(b.call(aten.mm.default, x, b.gather(shard, 5, 6)))
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(graph, [PassSpec("breaks", breaks)])


def test_a_graph_is_checked_after_each_pass_or_once_and_then_for_what_passes_may_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = Builder()
    x = b.input("x", 2)
    sine = b.call(aten.sin.default, x)
    graph = b.done(sine)
    checked: list[int] = []
    monkeypatch.setattr(Graph, "lint", lambda graph: checked.append(len(ran)))
    ran: list[str] = []

    def noted(name: str) -> PassSpec:
        return PassSpec(name, lambda graph: ran.append(name) or graph)  # type: ignore[func-returns-value]

    passes = [noted("a"), noted("b"), noted("c")]
    run_passes(graph, passes)
    run_passes(graph, passes, check_each=False)
    assert checked == [1, 2, 3]
    sine.append(x)
    run_passes(graph, passes, check_each=False)
    assert checked == [1, 2, 3, 9], "torch says what is wrong"
    x.append(sine)
    sine.name = x.name
    run_passes(graph, passes, check_each=False)
    assert checked == [1, 2, 3, 9, 12]


@pytest.mark.parametrize("prefetch", [True, False])
def test_all_passes_together_leave_no_op_that_only_tracing_knows(prefetch: bool) -> None:
    b = Builder()
    shards = [b.shard(name, 64) for name in "abc"]
    x, g = b.input("x", 8, 8), b.input("g", 8, 8)
    outputs: list[Node] = []
    for shard in shards:
        x = b.call(aten.mm.default, x, b.gather(shard, 8, 8))
        outputs.append(b.reduce(b.call(aten.mm.default, g, x), shard))
    graph = run_passes(b.done(*outputs, x), default_passes(PassContext(CompileConfig(prefetch=prefetch), 2)))
    names = [str(node.target) for node in graph.nodes if "lightning_zero" in str(node.target)]
    assert names.count("lightning_zero.reduce_add.default") == 3
    assert not {"lightning_zero.gather.default", "lightning_zero.reduce.default"} & set(names)
    assert printed(graph)[-1].startswith("return (None, None, None, mm")


def test_graphs_that_only_read_shards_in_place_begin_with_their_plan() -> None:
    """The op brings writes of eager code to the shards."""
    b = Builder()
    shard, x = b.shard("a", 64), b.input("x", 8, 8)
    graph = b.done(b.call(aten.mm.default, x, b.gather(shard, 8, 8)))
    graph = run_passes(graph, default_passes(PassContext(CompileConfig(), 1)))
    assert order(graph) == "check_plan(a) view view mm"


def runs(graph: Graph, *passes: PassSpec) -> list[PassTrace]:
    seen: list[PassTrace] = []
    run_passes(graph, passes, seen.append)
    return seen


def swap(graph: Graph) -> Graph:
    """Remove a relu, add a neg, change a product's input and move the gather after the first node."""
    relu = graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with graph.inserting_before(relu):
        neg = graph.call_function(aten.neg.default, relu.args)
    neg.meta["val"] = relu.meta["val"]
    relu.replace_all_uses_with(neg)
    graph.erase_node(relu)
    gather = graph.find_nodes(op="call_function", target=torch.ops.lightning_zero.gather.default)[0]
    neg.append(gather)
    return graph


def small() -> Graph:
    b = Builder()
    shard, x = b.shard("w"), b.input("x", 4, 4)
    whole = b.gather(shard, 4, 4)
    return b.done(b.call(aten.mm.default, b.call(aten.relu.default, x), whole))


def test_each_node_that_a_pass_touches_is_named_once() -> None:
    (trace,) = runs(small(), PassSpec("swap", swap))
    assert trace.name == "swap"
    assert trace.added == ("neg_default",)
    assert trace.removed == ("relu_default",)
    assert trace.changed == ("mm_default",)
    assert trace.moved in (("gather_default",), ())  # a diff may report either of two neighbors as moved
    assert trace.nodes == 6


def test_the_diff_shows_the_nodes_as_lines() -> None:
    (trace,) = runs(small(), PassSpec("swap", swap))
    lines = trace.diff.splitlines()
    assert lines[:2] == ["--- before", "+++ after swap"]
    assert "-relu_default = aten.relu.default(x)  # float32[4, 4]" in lines
    assert "+neg_default = aten.neg.default(x)  # float32[4, 4]" in lines
    assert "-mm_default = aten.mm.default(relu_default, gather_default)  # float32[4, 4]" in lines
    assert "+mm_default = aten.mm.default(neg_default, gather_default)  # float32[4, 4]" in lines
    assert not any(line.startswith(("-w ", "+w ", "-x ", "+x ")) for line in lines)


def test_a_pass_that_only_reorders_has_moved_nodes() -> None:
    def behind(graph: Graph) -> Graph:
        first, second = graph.find_nodes(op="call_function", target=aten.relu.default)
        second.append(first)
        return graph

    b = Builder()
    x = b.input("x", 4)
    graph = b.done(b.call(aten.relu.default, x), b.call(aten.relu.default, x))
    (trace,) = runs(graph, PassSpec("behind", behind))
    assert (trace.added, trace.removed, trace.changed) == ((), (), ())
    assert len(trace.moved) == 1


def test_a_pass_that_does_nothing_has_no_diff() -> None:
    (trace,) = runs(small(), PassSpec("look", lambda graph: graph))
    assert (trace.diff, trace.added, trace.removed, trace.changed, trace.moved) == ("", (), (), (), ())


def test_the_time_is_that_of_the_pass_alone() -> None:
    now = 0.0

    def slow(graph: Graph) -> Graph:
        nonlocal now
        now += 0.5
        return graph

    with patch("lightning_zero.compile.passes.base.perf_counter", lambda: now):
        traces = runs(small(), PassSpec("look", lambda graph: graph), PassSpec("slow", slow))
    assert [trace.milliseconds for trace in traces] == [0, 500]


def test_graphs_come_out_the_same_whether_watched_or_not() -> None:
    passes = default_passes(PassContext(CompileConfig(), 2))
    seen: list[PassTrace] = []
    watched, alone = run_passes(products("abc"), passes, seen.append), run_passes(products("abc"), passes)
    assert order(watched) == order(alone)
    assert [trace.name for trace in seen] == [spec.name for spec in passes]
    assert next(trace for trace in seen if trace.name == "group_gathers").removed == (
        "gather_default",
        "gather_default_1",
        "gather_default_2",
    )
