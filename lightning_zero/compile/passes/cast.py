"""Gathers a weight in the dtype it is used in.

Under autocast a weight is gathered in float32 and then cast. Casting first gives the same values and half the bytes on
the wire, and the executor has the cast shards ready: it keeps them as a shadow of the master weights, written once per
step.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import cast_dtype, gathers, ops

__all__ = ["fuse_casts"]


def fuse_casts(graph: Graph) -> Graph:
    """``cast(gather(s, shape, wide), narrow)`` becomes ``gather(s, shape, narrow)``, in place.

    A weight that is used in both dtypes (an embedding tied to the head) is gathered in both.
    """
    for node in gathers(graph):
        shard, shape, own, *kept = node.args
        assert isinstance(own, torch.dtype)
        narrow: dict[torch.dtype, Node] = {}
        for user in list(node.users):
            dtype = cast_dtype(user)
            if dtype is None or not dtype.is_floating_point or dtype.itemsize >= own.itemsize:
                continue
            if dtype not in narrow:
                with graph.inserting_before(node):
                    narrow[dtype] = graph.call_function(ops("gather"), (shard, shape, dtype, *kept))
                narrow[dtype].meta.update({key: value for key, value in user.meta.items() if key != "recompute"})
                narrow[dtype].meta["custom"] = node.meta.get("custom", {})  # the weight's name
            user.replace_all_uses_with(narrow[dtype])
            graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)
    return graph
