"""How torch's partitioner looks for the smallest cut of a joint graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import networkx

from lightning_zero.compat.graphs import RECOMPUTE
from lightning_zero.compat.lookup import module
from lightning_zero.compat.patches import Patch, swap_attribute
from lightning_zero.compat.smallest_cut import minimum_cut

partitioners = module("torch._functorch.partitioners")

__all__ = ["CannotCut", "fast_minimum_cut", "cache_minimum_cuts"]

# What it raises where a graph cannot be cut.
CannotCut = (AssertionError, RuntimeError, networkx.NetworkXException)


# Torch 2.15 has a fast one of its own, which the partitioner calls instead.
HAS_ITS_OWN = hasattr(partitioners, "minimum_cut")

_CUT = Patch(
    "the smallest cut of a joint graph is searched in small parts",
    # The partitioner asks networkx by this name. (torch 2.11+)
    {} if HAS_ITS_OWN else {"networkx.minimum_cut": "flowG, _s, _t, capacity, flow_func, backend, **kwargs"},
)
_CUTS = Patch(
    "cuts that several memory budgets share are searched once",
    {
        # Chooses the saved nodes for one set of options, and the nodes that must be saved. (torch 2.11+)
        "torch._functorch.partitioners.solve_min_cut": "joint_graph, node_info, min_cut_options, dont_ban",
    },
)


@_CUT
@contextmanager
def fast_minimum_cut() -> Iterator[None]:
    """Inside, it looks for cuts in small parts of a graph, and in equal ones once, which for 96 layers of GPT-2 takes
    0.1 CPU s instead of 3.0. Whichever way finds it, there is one smallest cut next to backward."""
    with nullcontext() if HAS_ITS_OWN else swap_attribute(networkx, "minimum_cut", minimum_cut):
        yield


@_CUTS
@contextmanager
def cache_minimum_cuts() -> Iterator[None]:
    """Inside, what it has found of one joint graph, as long as nodes and tags are the same, it does not look for again:
    of the cuts that a budget goes by, all but the last are the same for all budgets."""
    plain = partitioners.solve_min_cut
    found: dict[Any, Any] = {}

    def solve_min_cut(joint_graph: Any, node_info: Any, options: Any, dont_ban: Any = None) -> Any:
        tags = tuple(node.meta.get(RECOMPUTE) for node in joint_graph.nodes)
        key = joint_graph, repr(options), frozenset(dont_ban or ()), tags
        if key not in found:
            found[key] = plain(joint_graph, node_info, options, dont_ban)
        saved, banned = found[key]
        return list(saved), banned.copy()

    with swap_attribute(partitioners, "solve_min_cut", solve_min_cut):
        yield
