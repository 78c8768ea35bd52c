"""Lets a graph say, before its first collective, what it is going to gather and reduce.

The plan travels inside the graph, so it is there however the graph came about: compiled now, compiled again for another
length, or taken from a cache that an earlier process filled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import is_backward, is_reduce, is_start, ops, weight_name
from lightning_zero.compile.plan import Gather, GraphPlan, Reduce

__all__ = ["announce_plan", "read_plan"]

_wait = torch.ops._c10d_functional.wait_tensor.default
_PARTS = (_wait, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default)  # how a weight is cut out of its group


def announce_plan(graph: Graph) -> Graph:
    """Puts ``enter(shard, digest, plan)`` in front of the first collective, in place."""
    plan = read_plan(graph)
    first = next((node for node in graph.nodes if is_start(node) or is_reduce(node)), None)
    if first is None:
        return graph
    inputs = first.all_input_nodes if is_start(first) else first.all_input_nodes[-1:]
    beginning = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(beginning):
        enter = graph.call_function(ops("enter"), (inputs[0], plan.digest, plan.to_json()))
    enter.meta["val"] = None
    return graph


def read_plan(graph: Graph) -> GraphPlan:
    """The plan of a graph that passes have gone over."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    nodes = [node for node in nodes if node.target is not ops("enter")]
    position = {node: number for number, node in enumerate(nodes)}
    gathers = tuple(_gather(node, nodes, position) for node in nodes if is_start(node))
    reduces = tuple(_reduce(node, position) for node in nodes if is_reduce(node))
    return GraphPlan("backward" if is_backward(graph) else "forward", len(nodes), gathers, reduces)


def _gather(start: Node, nodes: list[Node], position: dict[Node, int]) -> Gather:
    waits = [user for user in start.users if user.target is _wait]
    waited = position[waits[0]] if waits else position[start]
    following = (node for node in nodes[position[start] + 1 :] if not is_start(node) and node.target not in _PARTS)
    uses = sorted((user for wait in waits for user in _uses(wait)), key=position.__getitem__)
    value = start.meta["val"]
    return Gather(
        weights=start.meta.get("weights") or (weight_name(start),),
        dtype=_word(value.dtype),
        bytes=value.numel() * value.dtype.itemsize,
        started=position[start],
        before=next((node.name for node in following), "the end"),
        waited=waited,
        used=uses[0].name if uses else "nothing",
        until=start.meta.get("until", "last use"),
    )


def _uses(wait: Node) -> list[Node]:
    """What reads the weights behind a wait: through the views that cut a group into weights."""
    found, pending = [], [wait]
    while pending:
        for user in pending.pop().users:
            if user.target in _PARTS:
                pending.append(user)
            elif user.op != "output":
                found.append(user)
    return found


def _reduce(node: Node, position: dict[Node, int]) -> Reduce:
    grads: Any = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    names = node.meta.get("weights") or (weight_name(node),)
    size = sum(int(grad.meta["val"].numel()) * grad.meta["val"].dtype.itemsize for grad in grads)
    return Reduce(tuple(names), _word(grads[0].meta["val"].dtype), size, position[node])


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
