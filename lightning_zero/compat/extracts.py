"""Copies of a joint graph that torch's partitioner makes and throws away: it makes five, of which two are the forward
and the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import partitioners
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.needed import does_more_in_a_copy, needed
from lightning_zero.compat.unwritten import With

__all__ = ["copying_less"]

Extract = Callable[..., Graph]


@contextmanager
def copying_less() -> Iterator[None]:
    """Inside, the partitioner makes none to see which nodes a forward has, none but that which becomes the backward to
    see what a backward reads, and none to bring that into another order."""
    # Copies what leads from some nodes to others. (torch 2.11+)
    plain: Extract = partitioners._extract_graph_with_inputs_outputs
    # Asks for a forward, of which it reads nodes' names. (torch 2.11+)
    classify = partitioners.classify_nodes
    # Copies a backward in the order of autograd. (torch 2.11+)
    reorder: Any = partitioners.reordering_to_mimic_autograd_engine
    # Settings that it asks for each node, each time by way of three calls. (torch 2.11+)
    names = "recompute_views", "treat_parameters_as_free_to_save", "max_dist_from_bw"
    asked = {name: getattr(partitioners.config, name) for name in names}

    def classified(*args: Any, **kwargs: Any) -> Any:
        with patch.object(partitioners, "_extract_graph_with_inputs_outputs", partial(_named, plain)):
            return classify(*args, **kwargs)

    with (
        patch.object(partitioners, "_extract_graph_with_inputs_outputs", _Backwards(_Extract(plain))),
        patch.object(partitioners, "classify_nodes", classified),
        patch.object(partitioners, "reordering_to_mimic_autograd_engine", _in_place(reorder)),
        # What it asks for functorch's settings. (torch 2.11+)
        patch.object(partitioners, "config", With(partitioners.config, **asked)),
        patch.object(Graph, "lint", lambda graph: None),  # goes through each graph four times, of which all are torch's
    ):
        yield


def _named(plain: Extract, joint: Graph, inputs: Sequence[Node], outputs: Sequence[Any], *how: Any) -> Any:
    """The nodes of which a copy would have been made."""
    kept = needed(joint, inputs, outputs, "forward", Node.is_impure)
    if kept is None:
        return plain(joint, inputs, outputs, *how)
    there = {*inputs, *kept}
    return SimpleNamespace(nodes=[node for node in joint.nodes if node in there])


class _Extract:
    """Makes copies of what is needed alone. Torch copies all that can be made, for which it walks through what each
    node is given, and asks each copy whether it can go."""

    def __init__(self, plain: Extract) -> None:
        self._plain = plain

    def __call__(
        self, joint: Graph, inputs: Sequence[Node], outputs: Any, texts: Any, half: str | None = None, **how: Any
    ) -> Graph:
        kept = None if how else needed(joint, inputs, outputs, half, does_more_in_a_copy())
        if kept is None:
            return self._plain(joint, _Inputs(inputs), outputs, texts, half, **how)
        # Looks in what a node is given for nodes that were left out, by a general walk. (torch 2.11+)
        none = patch.object(partitioners, "pytree", With(partitioners.pytree, arg_tree_leaves=lambda *a, **k: ()))
        with none, patch.object(Graph, "eliminate_dead_code", lambda graph: False):
            work: Any = SimpleNamespace(nodes=kept)
            return self._plain(work, _Inputs(inputs), outputs, texts, half)


class _Backwards:
    """Gives the last backward again where the same is asked for without inputs that it does not read."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        self._last: tuple[Graph, list[Node], Any] | None = None

    def __call__(
        self, joint: Graph, inputs: Sequence[Node], outputs: Any, texts: Any, subgraph: str | None = None, **how: Any
    ) -> Graph:
        others = joint, list(outputs), how
        if subgraph == "backward" and self._last is not None:
            (graph, known, same), self._last = self._last, None
            if same == others and _leaves_unread(graph, known, inputs):
                return graph
        graph = self._extract(joint, inputs, outputs, texts, subgraph, **how)
        if subgraph == "backward":
            for node in graph.find_nodes(op="placeholder"):
                node.meta = dict(node.meta)  # or what is noted of a forward's inputs would be noted of these
            self._last = graph, list(inputs), others
        return graph


def _in_place(reorder: FunctionType) -> Callable[..., Any]:
    """The function, which moves a graph's nodes where it would copy them."""
    instead = SimpleNamespace(Graph=_Order, GraphModule=_ordered, Node=Node)
    names = reorder.__globals__ | {"fx": instead, "torch": SimpleNamespace(fx=instead, ops=torch.ops)}
    return FunctionType(reorder.__code__, names, reorder.__name__, reorder.__defaults__, reorder.__closure__)


class _Order:
    """A graph in the making, as far as that function makes one: notes what it is given."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node_copy(self, node: Node, copied: Callable[[Node], Node]) -> Node:
        self.nodes.append(node)
        return node


def _ordered(module: GraphModule, order: _Order) -> GraphModule:
    kept = set(order.nodes)
    for node in reversed(module.graph.nodes):
        if node not in kept:
            module.graph.erase_node(node)
    for before, node in zip(order.nodes, order.nodes[1:], strict=False):
        if before.next is not node:
            before.append(node)
    module.recompile()
    return module


class _Inputs(list[Node]):
    """A list that is asked for each node of a graph whether it is in there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes)
        self._all = frozenset(nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._all


def _leaves_unread(graph: Graph, known: Sequence[Node], inputs: Sequence[Node]) -> bool:
    """Whether a copy has lost inputs, so that it has only these. One that does more than it returns would have come
    along as work."""
    left = set(inputs)
    copies = graph.find_nodes(op="placeholder")
    gone = [(node, copy) for node, copy in zip(known, copies, strict=True) if node not in left]
    others = [node for node in known if node in left]
    if others != list(inputs) or any(copy.users or _does_more(node) for node, copy in gone):
        return False
    for _, copy in gone:
        graph.erase_node(copy)
    return True


def _does_more(node: Node) -> bool:
    return node.op != "placeholder" and node.is_impure()
