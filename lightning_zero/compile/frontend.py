"""Looks at graphs as Dynamo made them, before they are differentiated.

Only these know what parameters are called: each gather is given its weight's name, which later graphs inherit. And only
these still show in-place edits, which later ones have turned into new values: a gathered weight is a value of the
graph, so an edit of it would be lost, and is refused. Here, too, inputs are still the tensors themselves.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.graphs import CUSTOM, EXAMPLE, ORIGIN
from lightning_zero.compile.graph import WEIGHT
from lightning_zero.errors import UnsupportedError

__all__ = ["has_collectives", "last_read", "name_weights", "refuse_edits"]

_DISTRIBUTED = "torch.distributed"

_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem,
}  # fmt: skip


def name_weights(graph: Graph) -> list[str]:
    """Notes in each gather's meta data which parameter it reads; see ``weight_name`` in ``compile/graph.py``. Returns
    the names."""
    names = []
    for node in _gathers(graph):
        names.append(_name(node))
        node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), WEIGHT: names[-1]}
    return names


def last_read(graph: Graph, inputs: Sequence[Any]) -> Any:
    """The input, the shard itself, of the last gather; None for a graph without gathers."""
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=False))
    found = _gathers(graph)
    return given.get(found[-1].args[0]) if found else None  # type: ignore[arg-type]


def _gathers(graph: Graph) -> list[Node]:
    op = torch.ops.lightning_zero.gather
    return [node for node in graph.nodes if getattr(node.target, "overloadpacket", node.target) is op]


def has_collectives(module: GraphModule) -> bool:
    """Whether ranks wait for each other inside this graph, or one that it calls, by more than our own ops."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return any("c10d" in str(t) or (getattr(t, "__module__", "") or "").startswith(_DISTRIBUTED) for t in targets)


def refuse_edits(graph: Graph) -> None:
    """Raises :class:`UnsupportedError`, naming the weight, when ``graph`` (Dynamo's own) writes to a gathered one."""
    weights: dict[int, Node] = {}  # storage -> the gather
    for node in _gathers(graph):
        storage = _storage(node)
        if storage is not None:
            weights[storage] = node
    if not weights:
        return
    for node in graph.nodes:
        for written in _written(node):
            gather = weights.get(_storage(written) or -1)
            if gather is not None:
                raise UnsupportedError(
                    f"The weight {_name(gather)!r} is edited in place inside compiled code, where the edit would be "
                    "lost. Edit it between steps (in on_train_batch_end, say), or decorate the method that edits it "
                    "with torch.compiler.disable."
                )


def _storage(node: Node) -> int | None:
    value = node.meta.get(EXAMPLE)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _written(node: Node) -> list[Node]:
    """The tensors that this node writes to."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return []
    written = [value for value in [node.kwargs.get("out")] if isinstance(value, Node)]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if (in_place or target in _IN_PLACE or node.kwargs.get("inplace") is True) and isinstance(node.args[0], Node):
        written.append(node.args[0])
    return written


def _name(gather: Node) -> str:
    shard = gather.args[0]
    assert isinstance(shard, Node)
    source = getattr(shard.meta.get(ORIGIN), "source", None)
    path = getattr(source, "name", "")
    keys = re.findall(r"_(?:modules|parameters)\['?([^'\]]+)'?\]", path() if callable(path) else path)
    return ".".join(keys) or shard.name
