"""Gathers a weight in the dtype it is used in.

Under autocast a weight is gathered in float32 and then cast. Casting first gives the same values and half the bytes on
the wire, and the executor has the cast shards ready: they are the compute copies of the master weights, written once
per step.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import CUSTOM, RECOMPUTE
from lightning_zero.compile.graph import cast_dtype, gathers, ops
from lightning_zero.compile.successors import NodeReplacer

__all__ = ["fuse_casts"]


def fuse_casts(graph: Graph) -> Graph:
    """``cast(gather(s, shape, wide), narrow)`` becomes ``gather(s, shape, narrow)``, in place.

    A weight that is used in both dtypes (an embedding tied to the head) is gathered in both.
    """
    casts, wide = NodeReplacer(graph), gathers(graph)
    for node in wide:
        _cast_before_permuting(graph, node)
        shard, shape, own, *resident = node.args
        assert isinstance(own, torch.dtype)
        narrow: dict[torch.dtype, Node] = {}
        for user in list(node.users):
            dtype = cast_dtype(user)
            if dtype is None or not dtype.is_floating_point or dtype.itemsize >= own.itemsize:
                continue
            if dtype not in narrow:
                with graph.inserting_before(node):
                    narrow[dtype] = graph.call_function(ops("gather"), (shard, shape, dtype, *resident))
                narrow[dtype].meta.update({key: value for key, value in user.meta.items() if key != RECOMPUTE})
                narrow[dtype].meta[CUSTOM] = node.meta.get(CUSTOM, {})  # the weight's name
            casts.replace(user, narrow[dtype])
    casts.done()
    for node in wide:
        if not node.users:
            graph.erase_node(node)
    return graph


def _cast_before_permuting(graph: Graph, gather: Node) -> None:
    """``cast(permute(gather))``, a ``channels_last`` weight's, becomes ``permute(cast(gather))``."""
    for permute in [user for user in gather.users if user.target is torch.ops.aten.permute.default]:
        for cast in [user for user in permute.users if cast_dtype(user) is not None]:
            with graph.inserting_before(cast):
                stored = graph.call_function(cast.target, (gather, *cast.args[1:]), cast.kwargs)  # type: ignore[arg-type]
                whole = graph.call_function(permute.target, (stored, *permute.args[1:]))  # type: ignore[arg-type]
            stored.meta.update(cast.meta)
            stored.meta["val"] = gather.meta["val"].new_empty(gather.meta["val"].shape, dtype=cast_dtype(cast))
            whole.meta.update(cast.meta)
            cast.replace_all_uses_with(whole)
            graph.erase_node(cast)
        if not permute.users:
            graph.erase_node(permute)
