"""How long whole weights are there, against what groups and uses say."""

from __future__ import annotations

import torch

from lightning_zero.compile.budget_sweep.live_values import Stay, on_host, stays
from lightning_zero.compile.context import GROUPS_PER_GRAPH, CompileConfig, PassContext
from lightning_zero.compile.passes.pipeline import FIRST_GROUPS
from tests.unit.compile.graphs import WEIGHT, Builder, products

aten = torch.ops.aten
LETTERS = "abcdefghijklmnopqrstuvwxyz"[: 2 * GROUPS_PER_GRAPH]


def context(**options: float) -> PassContext:
    return PassContext(CompileConfig(**options), 2)  # type: ignore[arg-type]


def test_small_weights_are_there_from_the_beginning() -> None:
    graph = products("ab")
    nodes = list(graph.nodes)
    uses = [nodes.index(node) for node in nodes if node.target is aten.mm.default]
    assert stays(graph, context()) == [Stay(0, use, WEIGHT) for use in uses]


def test_a_group_of_large_ones_comes_with_the_first_use_of_the_one_before() -> None:
    graph = products(LETTERS)
    nodes = list(graph.nodes)
    uses = [nodes.index(node) for node in nodes if node.target is aten.mm.default]
    found = stays(graph, context(prefetch=False, gather_group_mb=WEIGHT / 2**20))
    assert [stay.end for stay in found] == uses
    assert {stay.nbytes for stay in found} == {WEIGHT}
    begins = [stay.begin for stay in found]
    assert begins == sorted(begins)
    assert begins[0] == begins[1] == uses[0]  # the first group is started where it is used: nothing is before it
    assert len(FIRST_GROUPS) > 0
    assert all(begin in uses and begin <= use for begin, use in zip(begins, uses, strict=True))
    assert all(begin < use for begin, use in zip(begins[1:], uses[1:], strict=True))


def test_a_weight_that_is_returned_stays_to_the_end() -> None:
    b = Builder()
    shard, x = b.shard("a", 2048), b.input("x", 64, 64)
    whole = b.gather(shard, 64, 64)
    graph = b.done(b.call(aten.mm.default, x, whole), whole)
    assert [stay.end for stay in stays(graph, context())] == [len(graph.nodes) - 1]


def test_nothing_lies_on_the_host_by_itself() -> None:
    assert on_host(products("ab")) == set()
