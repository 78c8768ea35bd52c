"""Compute packed frozen weights next to the products that read them.

In traced graphs one op follows the gather of a packed weight. :func:`narrow_dequantized` lets it return the dtype to
which autocast casts. :func:`expand_dequantized` replaces it by elementwise ops, which Inductor fuses into one kernel.
It is the last pass of a graph, because earlier passes are faster on one node for each weight.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from lightning_zero.compile.fx_utils import cast_dtype, narrowing_casts, repeat_views
from lightning_zero.sharding.dequantize_kernel import is_available
from lightning_zero.sharding.weight_format import DEQUANTIZE, decode


def narrow_dequantized(graph: Graph) -> Graph:
    """Let the op return the dtype to which a dequantized weight, or a view of it, is cast, in place."""
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        packed, shape, own, kind = node.args
        assert isinstance(packed, Node)
        narrow: dict[torch.dtype, Node] = {}
        for cast, views in narrowing_casts(node):
            dtype = cast_dtype(cast)
            assert dtype is not None
            if dtype not in narrow:
                with graph.inserting_after(node):
                    narrow[dtype] = graph.call_function(DEQUANTIZE, (packed, shape, dtype, kind))
                narrow[dtype].meta = dict(node.meta)
                narrow[dtype].meta["val"] = node.meta["val"].to(dtype)
            with graph.inserting_before(cast):
                cast.replace_all_uses_with(repeat_views(graph, narrow[dtype], views))
            for unused in (cast, *reversed(views), node):
                if not unused.users:
                    graph.erase_node(unused)
    return graph


def expand_dequantized(graph: Graph) -> Graph:
    """Replace each op that dequantizes a weight by elementwise ops, in place, if no kernel computes it."""
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        packed, shape, dtype, kind, *rest = node.args
        assert isinstance(packed, Node)
        value = packed.meta["val"]
        if is_available(value.device):
            continue
        call = _Inserter(graph, getattr(value, "fake_mode", None))
        with graph.inserting_before(node):
            weight = decode(call, packed, tuple(shape), dtype, str(kind), value.device, *rest)  # type: ignore[arg-type]
        weight.meta = {**node.meta, "val": weight.meta["val"]}
        node.replace_all_uses_with(weight)
        graph.erase_node(node)
    return graph


class _Inserter:
    """Insert calls with the values of their results."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self._graph, self._mode = graph, mode

    def __call__(self, op: Any, *args: Any, **settings: Any) -> Node:
        made = self._graph.call_function(op, args, settings)
        with self._mode or nullcontext():
            made.meta["val"] = op(*map_arg(args, lambda read: read.meta["val"]), **settings)
        return made
