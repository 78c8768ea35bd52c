"""Copies of a joint graph that torch's partitioner makes and throws away: it makes five, of which two are the forward
and the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.lookup import module
from lightning_zero.compat.patches import Patch, swap_attribute
from lightning_zero.compat.reachability import does_more_in_a_copy, needed
from lightning_zero.compat.skipped_text import With

partitioners = module("torch._functorch.partitioners")

__all__ = ["skip_graph_copies"]

_PARTITION = "torch._functorch.partitioners"
_COPIES = Patch(
    "a joint graph is not copied to see which nodes its halves have",
    {
        # Copies what leads from some nodes to others. (torch 2.11+)
        f"{_PARTITION}._extract_graph_with_inputs_outputs": (
            "joint_graph, inputs, outputs, outputs_descs, subgraph, ignore_must_be_in_fw_bw"
        ),
        # Asks for a forward, of which it reads nodes' names. (torch 2.11+)
        f"{_PARTITION}.classify_nodes": "joint_module, static_lifetime_input_indices, num_fwd_outputs",
        # Copies a backward in the order of autograd. (torch 2.11+)
        f"{_PARTITION}.reordering_to_mimic_autograd_engine": "gm",
        # The module that the partitioner reads settings from. (torch 2.11+)
        f"{_PARTITION}.config": None,
        # Goes through each graph four times, all of which are torch's. (torch 2.11+)
        "torch.fx.Graph.lint": "self",
        # Looks in what a node is given for nodes that were left out, by a general walk. (torch 2.11+)
        f"{_PARTITION}.pytree.arg_tree_leaves": "*args, **kwargs",
        # Looks for nodes that nothing reads.
        "torch.fx.Graph.eliminate_dead_code": "self, is_impure_node",
    },
    needs=(
        f"{_PARTITION}.pytree",
        # Settings that it asks for each node, each time by way of three calls. (torch 2.11+)
        f"{_PARTITION}.config.recompute_views",
        f"{_PARTITION}.config.treat_parameters_as_free_to_save",
        f"{_PARTITION}.config.max_dist_from_bw",
        # Tell nodes that are tagged for one half, or write into such a node's memory. (torch 2.11+)
        f"{_PARTITION}._must_be_in_backward",
        f"{_PARTITION}._must_be_in_forward",
    ),
)

Extract = Callable[..., Graph]


@_COPIES
@contextmanager
def skip_graph_copies() -> Iterator[None]:
    """Inside, the partitioner makes none to see which nodes a forward has, none but that which becomes the backward to
    see what a backward reads, and none to bring that into another order."""
    plain: Extract = partitioners._extract_graph_with_inputs_outputs
    classify = partitioners.classify_nodes
    reorder: Any = partitioners.reordering_to_mimic_autograd_engine
    names = "recompute_views", "treat_parameters_as_free_to_save", "max_dist_from_bw"
    asked = {name: getattr(partitioners.config, name) for name in names}

    def classified(*args: Any, **kwargs: Any) -> Any:
        with swap_attribute(partitioners, "_extract_graph_with_inputs_outputs", partial(_named, plain)):
            return classify(*args, **kwargs)

    with (
        swap_attribute(partitioners, "_extract_graph_with_inputs_outputs", _Backwards(_Extract(plain))),
        swap_attribute(partitioners, "classify_nodes", classified),
        swap_attribute(partitioners, "reordering_to_mimic_autograd_engine", _in_place(reorder)),
        swap_attribute(partitioners, "config", With(partitioners.config, **asked)),
        swap_attribute(Graph, "lint", lambda graph: None),
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
        self,
        joint: Graph,
        inputs: Sequence[Node],
        outputs: Any,
        texts: Any,
        half: str | None = None,
        ignore_must_be_in_fw_bw: bool = False,
    ) -> Graph:
        kept = None if ignore_must_be_in_fw_bw else needed(joint, inputs, outputs, half, does_more_in_a_copy())
        if kept is None:
            return self._plain(joint, _Inputs(inputs), outputs, texts, half, ignore_must_be_in_fw_bw)
        with _copied_as_they_are():
            work: Any = SimpleNamespace(nodes=kept)
            return self._plain(work, _Inputs(inputs), outputs, texts, half)


@_COPIES
@contextmanager
def _copied_as_they_are() -> Iterator[None]:
    """Inside, torch does not look for nodes to leave out."""
    with (
        swap_attribute(partitioners, "pytree", With(partitioners.pytree, arg_tree_leaves=lambda *a, **k: ())),
        swap_attribute(Graph, "eliminate_dead_code", lambda graph: False),
    ):
        yield


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
