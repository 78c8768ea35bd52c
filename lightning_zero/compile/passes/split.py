"""Splits each gather into a start and a wait.

The start launches the all-gather and returns the weight's memory; the wait makes the compute stream wait for it.
Nothing is moved
here: passes that start gathers earlier move the starts.
"""

from __future__ import annotations

from torch.fx import Graph

from lightning_zero.compat.graphs import RECOMPUTE
from lightning_zero.compat.ops import wait_tensor
from lightning_zero.compile.graph import gathers, ops
from lightning_zero.compile.successors import NodeReplacer

__all__ = ["split_gathers"]


def split_gathers(graph: Graph) -> Graph:
    """``w = gather(s)`` becomes ``f = gather_start(s); w = wait_tensor(f)``, in place."""
    waits = NodeReplacer(graph)
    for node in gathers(graph):
        with graph.inserting_before(node):
            start = graph.call_function(ops("gather_start"), node.args[:3])
            ready = graph.call_function(wait_tensor, (start,))
        for new in (start, ready):
            new.meta.update({key: value for key, value in node.meta.items() if key != RECOMPUTE})
        waits.replace(node, ready)
    waits.done()
    return graph
