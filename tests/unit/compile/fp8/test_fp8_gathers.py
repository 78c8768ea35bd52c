"""Weights of converted products are gathered in fp8 if only these read them, and their factors come from the executor."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compile.fp8 import convert_products
from lightning_zero.compile.fx_utils import find_calls, gathers, weight_name
from lightning_zero.compile.scaled_mm_op import SCALED_MM
from lightning_zero.config import CompileConfig
from lightning_zero.native.ops import OPS
from tests.unit.compile.fp8.linear_graphs import BF16, Layers, called, cast
from tests.unit.compile.graphs import aten

E4M3 = torch.float8_e4m3fn


def converted(graph: Graph, **options: object) -> Graph:
    config = CompileConfig(**{"linear_dtype": "fp8", "fp8_min_gain": 0.0} | options)  # type: ignore[arg-type]
    graph = convert_products(graph, config, fp8_shards=True)
    graph.lint()
    return graph


def dtypes(graph: Graph) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for node in gathers(graph):
        assert node.meta["val"].dtype is node.args[2]
        found.setdefault(weight_name(node), []).append(node.args[2])
    return found


def factors(graph: Graph) -> list[Node]:
    return find_calls(graph, [OPS["weight_factor"]])


def test_a_weight_is_gathered_once_in_fp8_for_both_products() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).linear("b", 32).done())
    assert dtypes(graph) == {"net.a": [E4M3], "net.b": [E4M3]}
    assert len(called(graph, aten.amax.default)) == 4  # of two activations and two gradients, not of weights
    assert not [node for node in called(graph, cast) if node.args[1] is BF16]
    weights = dict(zip(gathers(graph), factors(graph), strict=True))
    for product in called(graph, SCALED_MM):
        for matrix, scale in zip(product.args[:2], product.args[2:4], strict=True):
            assert isinstance(matrix, Node)
            source = matrix
            while source.target in (aten.clone.default, aten.permute.default):
                source = source.all_input_nodes[0]
            if source in weights:
                assert scale is weights[source]
                assert source.args[0] is weights[source].args[0]  # the shard


def test_the_gather_is_recomputed_like_the_cast_that_it_replaces_and_the_factor_saved() -> None:
    graph = Layers(48, 64).linear("a", 32).done()
    [gather], [weight] = gathers(graph), [node for node in called(graph, cast) if node.args[1] is BF16]
    gather.meta |= {AC_GRAPH_ID: 7, RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
    weight.meta |= {AC_GRAPH_ID: 7, RECOMPUTE: CheckpointPolicy.MUST_SAVE}
    graph = converted(graph)
    [gather], [factor] = gathers(graph), factors(graph)
    assert (gather.meta[AC_GRAPH_ID], gather.meta[RECOMPUTE]) == (7, CheckpointPolicy.MUST_SAVE)
    assert factor.meta[RECOMPUTE] is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("reader", ["product in 16 bits", "sum", "cast from bfloat16", "cache"])
def test_a_weight_with_other_readers_stays_in_16_bits(reader: str) -> None:
    layers = Layers(48, 64)
    cache = layers.builder.input("cache", 64, 64, dtype=BF16)
    layers.linear("a", 64)
    b, options = layers.builder, {}
    _, weight = layers.weight("a", 64, 64)
    [gather] = gathers(b.graph)
    if reader == "product in 16 bits":
        options = {"fp8_products": ("forward", "weight_gradient")}
    elif reader == "sum":
        layers.x = b.call(aten.add.Tensor, layers.x, b.call(aten.sum.default, weight))
    elif reader == "cast from bfloat16":
        gather.args[0].meta["val"] = gather.args[0].meta["val"].bfloat16()  # type: ignore[union-attr]
    else:
        gather.args = (*gather.args, cache)
    graph = converted(layers.linear("b", 64).done(), **options)
    found = dtypes(graph)
    assert found["net.a"] == [torch.float32]
    if reader in ("sum", "cast from bfloat16", "cache"):
        assert found["net.b"] == [E4M3]


def test_without_fp8_shards_weights_are_gathered_as_before() -> None:
    graph = Layers(48, 64).linear("a", 32).done()
    graph = convert_products(graph, CompileConfig(linear_dtype="fp8", fp8_min_gain=0.0))
    assert dtypes(graph) == {"net.a": [torch.float32]}
    assert not factors(graph)
