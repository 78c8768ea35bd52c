"""Bytes that a graph takes at once, against sums by hand."""

import torch

from lightning_zero.compile.context import GROUPS_PER_GRAPH, CompileConfig, PassContext
from lightning_zero.planning.lifetimes import graph_peak
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
GRADIENT = 64 * 64 * 4


def products(count: int, then: int = 0) -> torch.fx.Graph:
    """Of one pair of inputs, each a gradient that is returned; then ``then`` more, none of which lives on."""
    b = Builder()
    x, y = b.input("x", 64, 64), b.input("y", 64, 64)
    gradients = [b.call(aten.mm.default, x, y) for _ in range(count)]
    z = x
    for _ in range(then):
        z = b.call(aten.mm.default, z, y)
    return b.done(*gradients, z)


def peak(graph: torch.fx.Graph, gradients: int, reduce_group_mb: float = 1000.0) -> float:
    """In gradients."""
    context = PassContext(CompileConfig(reduce_group_mb=reduce_group_mb), 2)
    return graph_peak(graph, context, set(), gradients, fuses=True) / GRADIENT


def test_gradients_of_weights_leave_in_groups_and_do_not_wait_for_the_end() -> None:
    several = 4 * GROUPS_PER_GRAPH
    assert peak(products(several), several) == 4
    assert peak(products(several), several, reduce_group_mb=2 * GRADIENT / 2**20) == 2


def test_what_else_a_graph_returns_stays_to_its_end() -> None:
    several = 4 * GROUPS_PER_GRAPH
    assert peak(products(several), 0) == several
    assert peak(products(several), several // 2) == several // 2


def test_what_is_read_for_the_last_time_makes_room() -> None:
    graph = products(0, then=5)
    assert peak(graph, 0) == 2
