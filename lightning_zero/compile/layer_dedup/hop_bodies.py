"""Graphs called by nodes of Dynamo's graph: autograd functions and checkpointed regions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.graphs import CHECKPOINT_POLICY, CHECKPOINT_POLICY_HASH
from lightning_zero.compat.tensors import CHECKPOINTS, function_call
from lightning_zero.compile.fx_utils import results

_CALLS = {function_call, *CHECKPOINTS}


def hop_body(node: Node) -> GraphModule | None:
    """Return the graph of an autograd function or a checkpointed region that a ``get_attr`` node names."""
    if node.op != "get_attr" or any(user.target not in _CALLS for user in node.users):
        return None
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value if isinstance(value, GraphModule) else None


def is_region(node: Node) -> bool:
    """Return True if the node of :func:`hop_body` names a checkpointed region."""
    return all(user.target in CHECKPOINTS for user in node.users)


def regions(node: Node) -> Iterator[GraphModule]:
    """Yield the graphs of checkpointed regions that the node calls with all of its arguments."""
    if node.target in CHECKPOINTS:
        for body in filter(None, map(hop_body, node.all_input_nodes)):
            if len(body.graph.find_nodes(op="placeholder")) == len(node.args) - 1:
                yield body


def expand_regions(nodes: Iterable[Node]) -> list[Node]:
    """Return nodes followed by the nodes of their regions, in equal order for equal nodes."""
    found = list(nodes)
    for node in list(found):
        for body in regions(node):
            found += expand_regions(body.graph.nodes)
    return found


def readers(node: Node, users: Iterable[Node]) -> Iterator[Node]:
    """Yield users that read a value; if a user passes it to a region, yield the readers in the region."""
    for user in users:
        bodies = list(regions(user))
        if not bodies:
            yield user
        for body in bodies:
            for inside, given in _inputs(body, user):
                if given is node:
                    yield from readers(inside, inside.users)


def _inputs(body: GraphModule, call: Node) -> Iterator[tuple[Node, Any]]:
    return zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True)


def bypass_region_inputs(graph: Graph) -> None:
    """Replace results that a region returns unchanged by the region's input, in place.

    A layer that returns its input cannot be traced alone. T5 layers return the bias of their attention.
    """
    for node in graph.nodes:
        for body in regions(node):
            given, returned = dict(_inputs(body, node)), results(body.graph)
            for part in [user for user in node.users if user.target is operator.getitem]:
                at = part.args[1]
                result = returned[at] if isinstance(at, int) else None
                source = given.get(result) if isinstance(result, Node) else None
                if isinstance(source, Node):
                    part.replace_all_uses_with(source)
                    graph.erase_node(part)


def describe_policy(body: GraphModule) -> str:
    """Return a text that differs for different save policies of a region in this process.

    It is asked for one layer of a kind. A policy that counts regions therefore gives all layers the choice of the
    first.
    """
    return _described(body.meta.get(CHECKPOINT_POLICY))


def has_own_policy(nodes: Iterable[Node]) -> bool:
    """Return True if some region's save policy is user code that no text describes."""
    policies = [body.meta.get(CHECKPOINT_POLICY) for node in nodes for body in regions(node)]
    return any(policy is not None and not hasattr(policy, CHECKPOINT_POLICY_HASH) for policy in policies)


def _described(value: Any) -> str:
    if hasattr(value, CHECKPOINT_POLICY_HASH):
        return repr(getattr(value, CHECKPOINT_POLICY_HASH))
    if isinstance(value, partial):  # Dynamo makes a new one for each call
        return f"{_described(value.func)} {_described(value.args)} {_described(tuple(value.keywords.items()))}"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_described, value))}]"
    return repr(value) if value is None or isinstance(value, str | int) else str(id(value))
