"""The fast partitioner returns the graphs of torch's partitioner, with fewer copies."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import inf
from random import Random
from typing import Any

import networkx
import pytest
import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch._functorch import compile_utils
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat import fast_partitioner as partitioner
from lightning_zero.compat.compiler import aot_autograd, inductor_config, inductor_partition
from lightning_zero.compat.fast_partitioner import fast_partitioner

aten = torch.ops.aten
Loss = Callable[[Tensor, Tensor], Tensor]


def layers(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = x + nn.functional.gelu((x * x.square().mean(-1, keepdim=True).rsqrt()) @ weight) @ weight.t()
    return x.square().mean()


def drawn(x: Tensor, weight: Tensor) -> Tensor:
    unread = torch.rand_like(x)  # advances the generator, although nothing reads it
    del unread
    return nn.functional.dropout(x @ weight, 0.5).sin().sum() + torch.rand(3, device=x.device).sum()


def unread_in_backward(x: Tensor, weight: Tensor) -> Tensor:
    noise = torch.bernoulli(torch.full_like(x, 0.5))
    return ((x + noise) @ weight).sum() + (noise * 3).sum().detach()


def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda x: (x @ weight).sin().cos(), x, use_reentrant=False)
    return (made @ weight.t()).square().sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # edits its buffers

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = self.norm((x @ weight)[:, :8]).sin()
        return made.sum()


LOSSES: dict[str, Callable[[], Loss]] = {
    "layers": lambda: layers,
    "random numbers": lambda: drawn,
    "not read in backward": lambda: unread_in_backward,
    "checkpointed": lambda: checkpointed,
    "buffers": Normed,
}


def partitioned(loss: Loss, by: Callable[..., Any], x: Tensor) -> tuple[list[str], list[int], Any]:
    """Return both graphs as text, how often nodes were copied and code was generated, and the results."""
    found: list[str] = []
    copies = [0, 0]
    plain, recompile = Graph.node_copy, GraphModule.recompile

    def counted(*args: Any) -> Any:
        copies[0] += 1
        return plain(*args)

    def written(module: GraphModule) -> Any:
        copies[1] += 1
        return recompile(module)

    def partition(module: Any, inputs: Any, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Graph, "node_copy", counted)
            patched.setattr(GraphModule, "recompile", written)
            halves = by(module, inputs, **settings)
        found.extend(str(half.graph) for half in halves)
        return halves

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = x.clone()  # torch 2.14 records symbolic sizes at the tensor, and its next graph would have more of them
    weight = torch.linspace(-1, 1, 16 * 24).view(16, 24).requires_grad_()
    backend = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=partition)
    result = torch.compile(loss, backend=backend, dynamic=x.shape[0] > 4 or None)(x, weight)
    return found, copies, (result, torch.autograd.grad(result, weight)[0], torch.rand(1))


def _boxed(module: Any, inputs: Any) -> Any:
    def run(given: list[Any]) -> Any:
        return module.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("plain", [min_cut_partition, inductor_partition], ids=["torch", "Inductor"])
@pytest.mark.parametrize("rows", [4, 6], ids=["fixed", "any length"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.exhaustive_variants(
    "layers-fixed-torch", "layers-fixed-Inductor", "buffers-any length-torch", "buffers-any length-Inductor"
)
def test_both_graphs_are_equal_and_fewer_nodes_are_copied(name: str, rows: int, plain: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 1, rows * 16).view(rows, 16)
    with inductor_config.patch(fallback_random=True):  # seeds need more of Inductor's state
        expected, before, results = partitioned(LOSSES[name](), plain, x)
        found, after, same = partitioned(LOSSES[name](), fast_partitioner(plain), x)
    assert found == expected
    assert len(found) == 2
    assert 0 < after[0] < before[0]
    assert after[1] < before[1]
    assert all(torch.equal(one, other) for one, other in zip(results, same, strict=True))


@pytest.mark.parametrize("draws", [False, True], ids=["computed", "drawn"])
def test_a_backward_graph_drops_inputs_that_it_does_not_read(draws: bool) -> None:
    plain = partitioner.partitioners._extract_graph_with_inputs_outputs
    copies: list[Graph] = []

    def counted(*args: Any, **how: Any) -> Graph:
        copies.append(plain(*args, **how))
        return copies[-1]

    joint = Graph()
    x, tangent = joint.placeholder("primals_1"), joint.placeholder("tangents_1")
    saved = joint.call_function(aten.sin.default, (x,))
    unread = joint.call_function(aten.rand.default, ([3],)) if draws else joint.call_function(aten.cos.default, (x,))
    gradient = joint.call_function(aten.mul.Tensor, (saved, tangent))
    joint.output((unread, gradient))
    asked = joint, [saved, unread, tangent], [gradient], [None], "backward"
    fewer = joint, [saved, tangent], [gradient], [None], "backward"
    again = partitioner._BackwardReuse(counted)
    again(*asked)
    made = again(*fewer)
    assert str(made) == str(plain(*fewer))
    assert made.find_nodes(op="placeholder")[0].meta is not saved.meta, "the forward graph keeps its metadata"
    assert len(copies) == 1 + draws
    again(*asked)
    assert str(again(joint, [tangent, saved], [gradient], [None], "backward")) != str(copies[-2])
    assert len(copies) == 3 + draws, "in another order"


def test_a_backward_graph_is_reordered_in_place() -> None:
    """Recomputed nodes move to their users, and unused nodes are removed, as in torch's copy."""
    reorder = partitioner.partitioners.reordering_to_mimic_autograd_engine

    def backward() -> GraphModule:
        graph = Graph()
        x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
        early = graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.cos.default, (x,))
        late = graph.call_function(aten.exp.default, (x,))
        first = graph.call_function(aten.mul.Tensor, (tangent, late))
        graph.output((graph.call_function(aten.mul.Tensor, (first, early)),))
        return GraphModule(nn.Module(), graph)

    expected, made = reorder(backward()), backward()
    assert partitioner._reorder_in_place(reorder)(made) is made
    made.graph.lint()
    assert str(made.graph) == str(expected.graph)
    assert made.code == expected.code
    assert "cos" not in made.code
    assert len(made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == 2


def test_torch_keeps_its_own_functions() -> None:
    before = dict(vars(partitioner.partitioners))
    x = torch.linspace(-1, 1, 64).view(4, 16)
    partitioned(layers, fast_partitioner(), x)
    assert dict(vars(partitioner.partitioners)) == before


BUDGETS = (0.2, 0.4, 0.6, 1.0)


@pytest.mark.parametrize("budget", BUDGETS)
def test_graphs_are_equal_within_a_budget(budget: float) -> None:
    x = torch.linspace(-1, 1, 64).view(4, 16)
    with functorch_config.patch(activation_memory_budget=budget):
        expected, _, _ = partitioned(layers, min_cut_partition, x)
        found, _, _ = partitioned(layers, fast_partitioner(), x)
    assert found == expected


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    one, other = (x.sin() @ y).cos(), (x.sin() @ y).cos()
    return one + other, (x * 2).sum(0, keepdim=True), (x * 2.0).sum(0, keepdim=False)


def random_numbers(x: Tensor, y: Tensor) -> Tensor:
    parts = [nn.functional.dropout(x, 0.5) for _ in range(2)] + [torch.empty(2, 2), torch.empty(2, 2)]
    return torch.stack([part.sum() for part in parts]).sum() + (torch.rand_like(x) - torch.rand_like(x) @ y).sum()


def mutated(x: Tensor, y: Tensor) -> Tensor:
    before, buffer = x.sin(), y.clone()
    first = buffer.cos()
    buffer.add_(x)
    return before + x.sin() + first + buffer.cos() + buffer.cos()


def returned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.exp(), x.exp(), x.exp() * y, x.t(), x.t()


def parts(x: Tensor, y: Tensor) -> Tensor:
    pairs = [torch.var_mean(x, [1]) for _ in range(2)]
    return sum((mean * y + var for var, mean in pairs), y.new_zeros(()))


def traced(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.randn(3, 3), torch.randn(3, 3))


def described(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (node.op, node.name, node.target, str(node.args), str(node.kwargs), sorted(map(str, node.meta)))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("function", [repeated, random_numbers, mutated, returned, parts])
def test_equal_nodes_are_removed_as_in_the_copy_of_torch(function: Callable[..., Any]) -> None:
    module = traced(function)
    expected = described(compile_utils.fx_graph_cse(deepcopy(module.graph)))
    nodes = list(module.graph.nodes)
    merged = partitioner._merge_equal_nodes(module.graph)
    assert merged is module.graph
    assert set(merged.nodes) <= set(nodes)
    assert described(merged) == expected
    merged.lint()


def test_random_numbers_and_outputs_are_not_merged() -> None:
    counts = {}
    for function in (repeated, random_numbers, returned):
        module = traced(function)
        counts[function.__name__] = len(module.graph.nodes)
        counts[function.__name__] -= len(partitioner._merge_equal_nodes(module.graph).nodes)
    assert counts["repeated"] >= 3
    assert counts["random_numbers"] == 0
    assert counts["returned"] == 0, "the caller may mutate one of two outputs"


NUMBERS = (0.0, -0.0, 0, False, 1, 1.0, True, 0j, complex(0.0, -0.0))


def test_numbers_that_are_equal_in_python_only_are_not_merged() -> None:
    """Torch merges 0.0 and -0.0, and the graph would divide by the wrong one."""
    graph = Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(aten.div.Tensor, (x, by)) for by in (*NUMBERS, 1)]
    graph.output(tuple(made))
    partitioner._merge_equal_nodes(graph)
    left = graph.find_nodes(op="call_function", target=aten.div.Tensor)
    assert [repr(node.args[1]) for node in left] == list(map(repr, NUMBERS))
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    assert results[-1] is results[4]


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


def test_a_side_keeps_nodes_that_it_reads_and_impure_nodes() -> None:
    nodes = joint()
    graph = nodes["x"].graph
    kept = partitioner._find_needed(graph, [nodes["x"]], [nodes["first"]], "forward")
    assert kept == [nodes["first"], nodes["drawn"], nodes["written"]], (
        "a mutation belongs to forward unless it is tagged"
    )
    kept = partitioner._find_needed(graph, [nodes["first"], nodes["tangent"]], [nodes["gradient"]], "backward")
    assert kept is not None
    assert kept[-1] == nodes["gradient"]


def test_a_side_whose_output_does_not_follow_from_its_inputs_is_left_to_torch() -> None:
    nodes = joint()
    assert partitioner._find_needed(nodes["x"].graph, [nodes["x"]], [nodes["gradient"]], "forward") is None


INSIDE = 9


def network_of(seeds: list[int]) -> Any:
    """A part for each seed, between source and sink, with few capacities, so that many cuts cost the same."""
    network: Any = networkx.DiGraph()
    network.add_nodes_from("st")
    for part, seed in enumerate(seeds):
        draw = Random(seed)
        nodes = [f"{part}.{number}" for number in range(INSIDE)]
        for _ in range(3 * INSIDE):
            first, last = draw.sample(nodes, 2)
            network.add_edge(first, last, capacity=draw.choice([0, 1, 1, 2, inf] if first < last else [0, 1, 3]))
        network.add_edge("s", nodes[0], capacity=inf)
        network.add_edge("s", nodes[1], capacity=draw.choice([1, 2]))
        network.add_edge(nodes[-1], "t", capacity=inf)
        network.add_edge(nodes[-2], "t", capacity=draw.choice([1, inf]))
        network.add_edge(nodes[-1], nodes[0], capacity=inf)  # backwards: free
    return network


@pytest.mark.parametrize("alike", [True, False])
def test_the_minimum_cut_is_the_one_of_networkx(alike: bool) -> None:
    cut = unbounded = 0
    for seed in range(100):
        network = network_of([seed] * 3 if alike else [seed, seed + 1, seed + 2])
        if seed % 2:
            network.add_edge("0.3", "1.5", capacity=1)  # connects two parts
        try:
            expected = networkx.minimum_cut(network, "s", "t")
        except networkx.NetworkXUnbounded:
            unbounded += 1
            with pytest.raises(networkx.NetworkXUnbounded):
                partitioner.minimum_cut(network, "s", "t")
        else:
            cut += 1
            assert partitioner.minimum_cut(network, "s", "t") == expected
    assert min(cut, unbounded) > 5


def test_equal_parts_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    plain = partitioner._cut_part

    def counted(part: Any) -> Any:
        nonlocal seen
        seen += 1
        return plain(part)

    monkeypatch.setattr(partitioner, "_cut_part", counted)
    network: Any = networkx.DiGraph()
    for layer in range(20):
        for before, behind, capacity in (("s", "a", 5), ("a", "b", 3), ("b", "c", 3), ("c", "t", 4)):
            network.add_edge(*(n if n in "st" else f"{layer}{n}" for n in (before, behind)), capacity=capacity)
    value, (near, beyond) = partitioner.minimum_cut(network, "s", "t")
    assert (value, seen) == (60, 1)
    assert beyond == {"t", *(f"{layer}c" for layer in range(20))}, "of equal ones, that next to the sink"
    assert near == set(network) - beyond
