"""Within an activation budget evenly spaced layers are saved, not the first ones."""

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import aot_function
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch.fx import Graph, Node

from lightning_zero.compile.partitioner.recompute_policy import EvenKnapsack, partitioner_settings, space_evenly

LAYERS = 16


def test_as_many_of_each_kind_are_saved_and_evenly_spaced() -> None:
    kinds = ["product", "product", "attention"] * 8
    found = space_evenly({0, 1, 3, 4, 2, 5}, kinds, range(24))
    assert Counter(kinds[index] for index in found) == {"product": 4, "attention": 2}
    assert [index for index in sorted(found) if kinds[index] == "product"] == [4, 9, 13, 18]
    assert [index for index in sorted(found) if kinds[index] == "attention"] == [8, 17]


def test_places_decide_what_is_evenly_spaced() -> None:
    assert space_evenly({0}, ["a"] * 3, [2, 0, 1]) == {2}


@pytest.mark.parametrize("count", range(6))
def test_all_and_nothing_stay_what_they_are(count: int) -> None:
    assert len(space_evenly(set(range(count)), ["a"] * 5, range(5))) == min(count, 5)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("budget", [0.2, 0.3, 0.5])
def test_no_long_chain_is_computed_again_at_once(budget: float) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(LAYERS)))
    products: list[bool] = []  # per layer: whether forward saves its product

    def forward(module: Any, inputs: Any) -> Any:
        saved = set(next(node for node in module.graph.nodes if node.op == "output").all_input_nodes)
        products.extend(node in saved for node in module.graph.nodes if node.target is torch.ops.aten.addmm.default)
        return module

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layers, dict(zip(names, params, strict=True)), x).square().mean()

    names = [name for name, _ in layers.named_parameters()]
    run: Any = aot_function(
        loss, fw_compiler=forward, bw_compiler=lambda module, _: module, partition_fn=min_cut_partition
    )
    with functorch_config.patch(partitioner_settings(budget)):
        run([*layers.parameters()], torch.randn(64, 16)).backward()
    saved = sum(products)
    assert 0 < saved <= LAYERS
    stretches = "".join("x" if one else "." for one in products).split("x")
    assert max(map(len, stretches)) <= -(-LAYERS // (saved + 1))


def product(graph: Graph, source: Node, width: int) -> Node:
    weight = graph.placeholder("weight")
    weight.meta["val"] = torch.empty(source.meta["val"].shape[1], width, device="meta")
    found = graph.call_function(torch.ops.aten.mm.default, (source, weight))
    found.meta["val"] = torch.empty(64, width, device="meta")
    return found


@pytest.mark.parametrize(("budget", "kept"), [(0.2, (1, 3, 0)), (0.3, (3, 3, 0)), (0.75, (3, 3, 2))])
def test_what_costs_most_is_saved_and_of_products_of_equal_worth_what_layers_hand_on(
    budget: float, kept: tuple[int, int, int]
) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 16, device="meta")
    kinds: tuple[list[Node], ...] = ([], [], [])
    # like attention's last product and two of a feed-forward, of which the second costs four times as much
    for _ in range(3):
        kinds[0].append(x := product(graph, x, 16))
        kinds[2].append(wide := product(graph, x, 64))
        kinds[1].append(x := product(graph, wide, 16))
    nodes = sorted(sum(kinds, []), key=lambda node: -node.meta["val"].numel())
    total = sum(node.meta["val"].numel() for node in nodes)
    sizes = [node.meta["val"].numel() / total for node in nodes]
    saved, again = EvenKnapsack()(sizes, graph, budget, None, nodes)
    assert sorted(saved + again) == list(range(9))
    assert nodes.index(x) in saved, "the last one is, whatever the budget"
    assert nodes.index(x) in EvenKnapsack()(sizes, graph, 0.01, None, nodes)[0]
    assert tuple(sum(nodes[index] in kind for index in saved) for kind in kinds) == kept


@pytest.mark.parametrize("units", [20.0, 20.51, 21.5])  # torch rounds them to 20, 21 and 22
def test_what_layers_hand_on_is_saved_first_however_torch_rounds_its_size(units: float) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 16, device="meta")
    narrow, wide = ([product(graph, x, width) for _ in range(96)] for width in (16, 44))
    x = product(graph, x, 16)  # the last one is always saved
    nodes = [*wide, *narrow, x]
    sizes = [node.meta["val"].shape[1] / 16 * units * 1e-4 for node in nodes]
    saved, _ = EvenKnapsack()(sizes, graph, 0.3, None, nodes)
    assert sum(nodes.index(node) in saved for node in narrow) > 90, "all but those that fill what is left over"


def test_what_sums_up_something_much_larger_is_saved_whatever_the_budget() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 4096, device="meta")
    products = [x := product(graph, x, 4096) for _ in range(3)]
    most, half = (graph.call_function(torch.ops.aten.amax.default, (x, [-1], True)) for _ in range(2))
    most.meta["val"], half.meta["val"] = (torch.empty(64, width, device="meta") for width in (1, 2048))
    nodes = [*products, half, most]
    total = sum(node.meta["val"].numel() for node in nodes)
    saved, _ = EvenKnapsack()([node.meta["val"].numel() / total for node in nodes], graph, 0.01, None, nodes)
    assert nodes.index(most) in saved
    assert nodes.index(half) not in saved
