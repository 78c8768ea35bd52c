"""How torch's partitioner looks for the smallest cut of a joint graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import networkx
from torch._functorch import partitioners

from lightning_zero.compat.graphs import RECOMPUTE
from lightning_zero.compat.smallest_cut import minimum_cut

__all__ = ["CannotCut", "cutting_fast", "cutting_often"]

# What it raises where a graph cannot be cut.
CannotCut = (AssertionError, RuntimeError, networkx.NetworkXException)


@contextmanager
def cutting_fast() -> Iterator[None]:
    """Inside, it looks for cuts in small parts of a graph, and in equal ones once, which for 96 layers of GPT-2 takes
    0.1 CPU s instead of 3.0. Whichever way finds it, there is one smallest cut next to backward."""
    # The partitioner asks networkx by this name. (torch 2.11+)
    with patch.object(networkx, "minimum_cut", minimum_cut):
        yield


@contextmanager
def cutting_often() -> Iterator[None]:
    """Inside, what it has found of one joint graph, as long as nodes and tags are the same, it does not look for again:
    of the cuts that a budget goes by, all but the last are the same for all budgets."""
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

    with patch.object(partitioners, "solve_min_cut", solve_min_cut):
        yield
