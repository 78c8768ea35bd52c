"""A joint graph in two halves within a budget, against torch's partition alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_zero.compat.compiler import aot_function, functorch_config, min_cut_partition
from lightning_zero.compile.partitioner.partition import partition_joint_graph
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings


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
