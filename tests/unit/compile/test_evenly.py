"""Within a budget of activations, of layers that are alike not the first ones are saved, but every so manieth."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compat.compiler import aot_function, functorch_config, min_cut_partition
from lightning_zero.compile.evenly import evenly, saved_within

LAYERS = 16


def test_as_many_of_each_kind_are_saved_and_evenly_spaced() -> None:
    kinds = ["product", "product", "attention"] * 8
    found = evenly({0, 1, 3, 4, 2, 5}, kinds, range(24))
    assert Counter(kinds[index] for index in found) == {"product": 4, "attention": 2}
    assert [index for index in sorted(found) if kinds[index] == "product"] == [4, 9, 13, 18]
    assert [index for index in sorted(found) if kinds[index] == "attention"] == [8, 17]


def test_places_decide_what_is_evenly_spaced() -> None:
    assert evenly({0}, ["a"] * 3, [2, 0, 1]) == {2}


@pytest.mark.parametrize("count", range(6))
def test_all_and_nothing_stay_what_they_are(count: int) -> None:
    assert len(evenly(set(range(count)), ["a"] * 5, range(5))) == min(count, 5)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("budget", [0.2, 0.3, 0.5])
def test_no_long_chain_is_computed_again_at_once(budget: float) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(LAYERS)))
    products: list[bool] = []  # of each layer, whether forward gives its product to backward

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
    with functorch_config.patch(saved_within(budget)):
        run([*layers.parameters()], torch.randn(64, 16)).backward()
    saved = sum(products)
    assert 0 < saved < LAYERS
    stretches = "".join("x" if one else "." for one in products).split("x")
    assert max(map(len, stretches)) <= -(-LAYERS // (saved + 1))
