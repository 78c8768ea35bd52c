"""A joint graph that is cut several times, against torch's partitioner as it is."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_zero.compat import cuts
from lightning_zero.compat.compiler import aot_function, functorch_config, min_cut_partition
from lightning_zero.compat.cuts import fast_minimum_cut

BUDGETS = (0.2, 0.4, 0.6, 1.0)


def loss(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = x + torch.nn.functional.gelu((x * x.square().mean(-1, keepdim=True).rsqrt()) @ weight) @ weight.t()
    return x.square().mean()


@pytest.fixture(scope="module")
def joint() -> tuple[GraphModule, dict[str, Any]]:
    kept: list[Any] = []

    def partition(module: GraphModule, inputs: Any, **settings: Any) -> Any:
        kept[:] = [GraphModule(module, deepcopy(module.graph)), settings]
        return min_cut_partition(module, inputs, **settings)

    run: Any = aot_function(loss, fw_compiler=_same, bw_compiler=_same, partition_fn=partition)
    run([torch.randn(32, 96, requires_grad=True) for _ in range(5)], torch.randn(64, 32)).backward()
    return kept[0], kept[1]


def _same(module: GraphModule, inputs: Any) -> GraphModule:
    return module


def halves(joint: tuple[GraphModule, dict[str, Any]], inside: AbstractContextManager[None]) -> list[str]:
    module, settings = joint
    found = []
    copy = GraphModule(module, deepcopy(module.graph))
    with inside:
        for number, budget in enumerate(BUDGETS):
            with functorch_config.patch(activation_memory_budget=budget, cse=number == 0):
                parts = min_cut_partition(copy, None, **settings)
            found.append("\n".join(str(part.graph) for part in parts))
    return found




@pytest.mark.skipif(cuts.HAS_ITS_OWN, reason="torch 2.15 has a fast way of its own, which it calls")
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_the_faster_way_finds_the_same_cuts(
    joint: tuple[GraphModule, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, count = cuts.minimum_cut, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(cuts, "minimum_cut", counted)
    expected = halves(joint, nullcontext())
    assert count == 0
    assert halves(joint, fast_minimum_cut()) == expected
    assert count > 0
