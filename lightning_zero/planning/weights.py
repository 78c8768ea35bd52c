"""Weights in graphs on paper: what stands for their gathers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.tensors import OpOverload
from lightning_zero.native.ops import FAKE_NAMESPACE

__all__ = ["insert_gathers", "fake_op"]

_LIBRARY = torch.library.Library(FAKE_NAMESPACE, "DEF")
_LIBRARY.define("gather(Tensor shard, int[] shape, ScalarType dtype) -> Tensor")
for _name in ("offload", "offload_start"):
    _LIBRARY.define(f"{_name}(Tensor value, Tensor shard) -> Tensor")
for _name in ("reload", "reload_start"):
    _LIBRARY.define(f"{_name}(Tensor host, Tensor shard) -> Tensor")
_LIBRARY.define("offload_wait(Tensor value, Tensor host, Tensor shard) -> ()")
_LIBRARY.define("reload_wait(Tensor(a) value, Tensor host, Tensor shard) -> Tensor(a)")


def fake_op(name: str) -> OpOverload:
    """What stands for an op of ours."""
    return getattr(getattr(torch.ops, FAKE_NAMESPACE), name).default


def insert_gathers(graph: Graph, count: int) -> None:
    """The first ``count`` inputs of a joint graph are parameters: from here on they are gathered before they are used,
    in place."""
    for shard in graph.find_nodes(op="placeholder")[:count]:
        value = shard.meta.get("val")
        if not isinstance(value, Tensor) or not shard.users:
            continue
        users = list(shard.users)
        with graph.inserting_before(users[0] if len(users) == 1 else _first(graph, set(users))):
            whole = graph.call_function(fake_op("gather"), (shard, list(value.shape), value.dtype))
        whole.meta = {key: held for key, held in shard.meta.items() if key in ("val", "tensor_meta")}
        for user in users:
            user.replace_input_with(shard, whole)


def _first(graph: Graph, wanted: set[Node]) -> Node:
    return next(node for node in graph.nodes if node in wanted)
