"""torch's partitioner, asked to cut one joint graph several times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import networkx
from networkx.algorithms.flow import boykov_kolmogorov
from torch._functorch import partitioners

from lightning_zero.compat.graphs import RECOMPUTE

__all__ = ["CannotCut", "cutting_often"]

# What it raises where a graph cannot be cut.
CannotCut = (AssertionError, RuntimeError, networkx.NetworkXException)


@contextmanager
def cutting_often() -> Iterator[None]:
    """Inside, what it has found of one joint graph, as long as nodes and tags are the same, it does not look for again:
    of the cuts that a budget goes by, all but the last are the same for all budgets. And it finds them by another way
    of networkx', which takes a third of the time for such graphs. Whichever finds it, there is one smallest cut next to
    backward."""
    # What is saved, and what must be, with some options and with some nodes that need not. (torch 2.11+)
    plain = partitioners.solve_min_cut
    found: dict[Any, Any] = {}

    def solve_min_cut(joint_graph: Any, node_info: Any, options: Any, dont_ban: Any = None) -> Any:
        tags = tuple(node.meta.get(RECOMPUTE) for node in joint_graph.nodes)
        key = joint_graph, repr(options), frozenset(dont_ban or ()), tags
        if key not in found:
            found[key] = plain(joint_graph, node_info, options, dont_ban)
        saved, banned = found[key]
        return list(saved), banned.copy()

    quicker = partial(networkx.minimum_cut, flow_func=boykov_kolmogorov)
    with patch.object(partitioners, "solve_min_cut", solve_min_cut), patch.object(networkx, "minimum_cut", quicker):
        yield
