"""Tags, checkpointed regions, budgets and mutated buffers in partitioned graphs, compared with torch's partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lightning_zero.compat.compiler import aot_autograd
from lightning_zero.compat.graphs import NN_MODULE_STACK
from lightning_zero.compile.fx_utils import reduces, results
from lightning_zero.compile.partitioner.partition import (
    OF_WEIGHTS,
    _module_path,
    partition_joint_graph,
    save_mutated_buffers,
    save_region_boundaries,
    tag_activations,
    tag_gathers,
)
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from lightning_zero.native import load
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def loss(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = x + torch.nn.functional.gelu(x @ weight) @ weight.t()
    return x.square().mean()


@pytest.fixture(scope="module")
def joint() -> tuple[GraphModule, Any, dict[str, Any]]:
    kept: list[Any] = []

    def partition(module: GraphModule, inputs: Any, **settings: Any) -> Any:
        kept[:] = [GraphModule(module, deepcopy(module.graph)), inputs, settings]
        return min_cut_partition(module, inputs, **settings)

    run: Any = aot_function(
        loss, fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graph, partition_fn=partition
    )
    run([torch.randn(32, 96, requires_grad=True) for _ in range(6)], torch.randn(64, 32)).backward()
    return kept[0], kept[1], kept[2]


def cut(joint: tuple[GraphModule, Any, dict[str, Any]], budget: float, alone: bool) -> tuple[Any, ...]:
    module, inputs, settings = joint
    copy = GraphModule(module, deepcopy(module.graph))
    others = {name: value for name, value in settings.items() if name != "num_fwd_outputs"}
    with functorch_config.patch(partitioner_settings(budget)):
        if alone:
            return (*min_cut_partition(copy, inputs, **settings), [])
        return partition_joint_graph(copy, inputs, settings["num_fwd_outputs"], budget, **others)


def saved(forward: GraphModule) -> int:
    [output] = forward.graph.find_nodes(op="output")
    values = [node.meta["val"] for node in output.args[0][1:] if node.op != "placeholder"]
    return sum(value.numel() * value.itemsize for value in values)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_without_a_budget_they_are_torchs(joint: tuple[GraphModule, Any, dict[str, Any]]) -> None:
    plain, own = cut(joint, 1.0, alone=True), cut(joint, 1.0, alone=False)
    assert [str(half.graph) for half in own[:2]] == [str(half.graph) for half in plain[:2]]
    assert own[2] == []


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("chains", [False, True])
def test_within_one_less_is_saved_and_sums_through_layers_are_looked_for(
    joint: tuple[GraphModule, Any, dict[str, Any]], chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def save_residual_sums(*given: Any) -> bool:
        seen.append(given)
        return chains

    monkeypatch.setattr("lightning_zero.compile.partitioner.partition.save_residual_sums", save_residual_sums)
    whole = cut(joint, 1.0, alone=False)
    assert seen == []
    forward, backward, changed = cut(joint, 0.5, alone=False)
    assert 0 < saved(forward) < saved(whole[0])
    assert [given[:2] for given in seen] == [(forward.graph, backward.graph)]
    assert changed == ([forward, backward] if chains else [])


MUST = CheckpointPolicy.MUST_RECOMPUTE


def tagged(graph: torch.fx.Graph) -> list[str]:
    return [node.name for node in tag_gathers(graph).nodes if node.meta.get("recompute") is MUST]


def test_a_gather_and_all_views_and_casts_of_it_are_recomputed_and_nothing_else() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    weight = b.gather(shard, 6, 5)
    narrow = b.call(aten._to_copy.default, weight, dtype=torch.bfloat16)
    flipped = b.call(aten.t.default, narrow)
    part = b.call(aten.slice.Tensor, flipped, 1, 0, 3)
    converted = b.call(torch.ops.prims.convert_element_type.default, weight, torch.float64)
    used = b.call(aten.mm.default, b.call(aten._to_copy.default, x, dtype=torch.bfloat16), flipped)
    view_of_used = b.call(aten.view.default, used, [48])
    graph = b.done(used, part, converted, view_of_used, b.call(aten.mul.Tensor, weight, 2.0))
    assert tagged(graph) == [
        "gather_default",
        "_to_copy_default",
        "t_default",
        "slice_tensor",
        "convert_element_type_default",
    ]


def test_a_weight_that_is_only_the_second_input_of_a_view_op_tags_nothing() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 6, 5)
    weight = b.gather(shard, 6, 5)
    graph = b.done(b.call(aten.expand_as.default, x, weight))
    assert tagged(graph) == ["gather_default"]


def test_regions_of_activation_checkpointing_keep_their_numbers() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    first = b.call(aten.relu.default, x)
    inside, last = b.call(aten.tanh.default, first), b.call(aten.tanh.default, first)
    for node in (first, inside, last):
        node.meta |= {"ac_graph_id": 7, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    graph = b.done(b.call(aten.mm.default, last, b.gather(shard, 5, 6)), inside)
    tag_gathers(graph)
    assert [node.meta["ac_graph_id"] for node in (first, inside, last)] == [7, 7, 7]
    assert first.meta["recompute"] is inside.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert last.meta["recompute"] is CheckpointPolicy.MUST_SAVE, "it is needed outside"
    # The partitioner honors tags only on nodes that have a region number.
    assert all("ac_graph_id" in node.meta for node in graph.nodes if node.op == "call_function")


def test_a_graph_without_weights_is_left_alone() -> None:
    b = Builder()
    x = b.input("x", 3, 3)
    graph = b.done(b.call(aten.t.default, x))
    before = {node: dict(node.meta) for node in graph.nodes}
    assert tagged(graph) == []
    assert {node: dict(node.meta) for node in graph.nodes} == before


def test_gradients_are_handed_over_in_backward() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 5, 6)
    weight = b.gather(shard, 5, 6)
    zeros = b.call(aten.zeros_like.default, x)  # depends on nothing that only backward has
    reduced = b.reduce(zeros, shard)
    tag_gathers(b.done(b.call(aten.mul.Tensor, x, weight), reduced))
    assert reduced.meta["partitioner_tag"] == "must_be_in_backward"


def test_the_partitioner_saves_no_weight() -> None:
    """Tags work on a joint graph of AOTAutograd with torch's min-cut partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    b = Builder()
    shard, x, tangent = b.shard("primals_1"), b.input("primals_2", 8, 5), b.input("tangents_1", 8, 6)
    narrow = b.call(aten._to_copy.default, b.gather(shard, 6, 5), dtype=torch.bfloat16)
    flipped = b.call(aten.t.default, narrow)
    low = b.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    out = b.call(aten.mm.default, low, flipped)
    low_tangent = b.call(aten._to_copy.default, tangent, dtype=torch.bfloat16)
    grad_x = b.call(aten.mm.default, low_tangent, b.call(aten.t.default, flipped))
    grad_w = b.call(aten.mm.default, b.call(aten.t.default, low_tangent), low)
    joint = b.done(out, b.reduce(grad_w, shard), grad_x)
    mode = torch._subclasses.FakeTensorMode()
    for node in joint.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    tag_gathers(joint)
    inputs = [node.meta["val"] for node in joint.nodes if node.op == "placeholder"]
    forward, backward = min_cut_rematerialization_partition(GraphModule({}, joint), inputs, num_fwd_outputs=1)
    saved = next(iter(reversed(forward.graph.nodes))).args[0][1:]
    assert {node.name for node in saved} <= {"primals_1", "primals_2", "_to_copy_default_1"}, forward.graph
    assert any("gather" in str(node.target) for node in backward.graph.nodes), backward.graph


def test_equal_gradients_of_a_tied_weight_are_all_handed_over() -> None:
    """The partitioner merges equal calls, and these are not outputs of the graph: their sum is."""
    b = Builder()
    shard, other, x = b.shard("shard"), b.shard("other"), b.input("x", 5, 6)
    weight = b.gather(shard, 5, 6)
    products = [b.call(aten.mul.Tensor, x, 2.0) for _ in range(3)]
    first, second, third = (b.reduce(product, shard) for product in products)
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, first, second), third)
    joint = b.done(b.call(aten.mul.Tensor, x, weight), total, b.reduce(products[0], other))
    mode = torch._subclasses.FakeTensorMode()
    for node in joint.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    tag_gathers(joint)
    left = fx_graph_cse(joint)
    assert len(left.find_nodes(op="call_function", target=aten.mul.Tensor)) == 2, "nothing was eliminated"
    assert [node.args[1].name for node in reduces(left)] == ["shard", "shard", "shard", "other"]
    enqueue_gradients(left)
    handed = left.find_nodes(op="call_function", target=torch.ops.lightning_zero.reduce_add.default)
    assert [len(node.args) for node in handed] == [2] * 4


def joint_graph(called_in: str = "L['module'].net.0") -> Graph:
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
    tag_activations(tag_gathers(joint_graph(written)), lambda op, size, path: asked.append(path))
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

    graph = tag_activations(tag_gathers(joint_graph()), policy)
    # Excluded are weights, which have tags, views, random ops, and backward.
    assert asked == [("aten.mm.default", 4 * 8 * 4, "net.0"), ("aten.relu.default", 4 * 8 * 4, "")]
    tagged = [node.name for node in graph.nodes if "recompute" in node.meta]
    assert tagged == ["gather_default"]


def test_its_answers_become_tags() -> None:
    graph = tag_activations(tag_gathers(joint_graph()), lambda op, size, path: "relu" in op)
    tags = {node.name: node.meta.get("recompute") for node in graph.nodes}
    assert tags["relu_default"] is CheckpointPolicy.MUST_RECOMPUTE
    assert tags["mm_default"] is CheckpointPolicy.MUST_SAVE
    assert tags["gather_default"] is CheckpointPolicy.MUST_RECOMPUTE
    assert tags["bernoulli_default"] is None
    assert tags["mul_tensor"] is None


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
    """Return the values that forward saves in addition to inputs, and the nodes of backward."""
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
    # Each region's first product is recomputed, and both have two derivatives; the last product is saved.
    assert sum(node.target is aten.mm.default for node in backward) == LAYERS * (1 + 4)
    sizes = [node.meta["val"].numel() for node in saved]
    assert max(sizes) <= 32, f"{sizes}: nothing of the inside"
    # sort()'s indices are needed, too.
    assert len(saved) == LAYERS * (2 if step is of_several_results else 1)


def test_what_lies_between_regions_is_not_computed_from_the_first_on() -> None:
    saved, backward = partitioned(part)
    assert sum(node.target is aten.mm.default for node in backward) == LAYERS * (1 + 4)
    assert all(node.meta["val"].numel() == 32 for node in saved)


def tagged_regions(node: Node, region: int) -> Node:
    node.meta |= {"ac_graph_id": region, "recompute": AGAIN}
    return node


def test_a_weight_that_two_regions_read_is_not_saved() -> None:
    """torch saves every value that goes from one region into a later one."""
    b = Builder()
    shard, x, tangent = b.shard("primals_1"), b.input("primals_2", 8, 8), b.input("tangents_1", 8, 8)
    weight = tagged_regions(b.gather(shard, 8, 8), 4)
    first = tagged_regions(b.call(aten.mm.default, x, weight), 4)
    second = tagged_regions(b.call(aten.mm.default, first, weight), 9)
    graph = b.done(second, b.reduce(b.call(aten.mm.default, tangent, weight), shard))
    tag_gathers(graph)
    assert weight.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert all(weight.meta["ac_graph_id"] >= user.meta["ac_graph_id"] for user in weight.users)
    assert weight.meta["ac_graph_id"] == OF_WEIGHTS
    assert first.meta["recompute"] is SAVE
    assert second.meta["recompute"] is AGAIN, "nothing but the caller wants it"


def test_what_only_derivatives_read_is_not_saved() -> None:
    """``detach()``, which derivatives insert before saved values, belongs to no region."""
    b = Builder()
    x, tangent = b.input("primals_1", 8, 8), b.input("tangents_1", 8, 8)
    inside = tagged_regions(b.call(aten.tanh.default, x), 3)
    noted = b.call(aten.detach.default, inside)
    out = tagged_regions(b.call(aten.sin.default, inside), 3)
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


def built(returns: str, edits: bool = True) -> Graph:
    """Build a graph of a batch and a buffer, which is read, multiplied, and updated by the product."""
    graph = Builder()
    x, buffer = graph.input("primals_1", 3, 5), graph.input("primals_2", 3, 5)
    values = {"x": x, "buffer": buffer, "turned": graph.call(aten.t.default, buffer)}
    values["product"] = graph.call(aten.mul.Tensor, x, buffer)
    if edits:
        graph.call(aten.copy_.default, buffer, values["product"])
    return graph.done(*(values[name] for name in returns.split()))


def run(graph: Graph) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return results for a batch of twos and a buffer of threes, and the buffer."""
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
