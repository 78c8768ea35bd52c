"""A part of a graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import SymFloat, SymInt
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from lightning_zero.compile.subgraphs.node_kinds import NodeKind
from lightning_zero.compile.subgraphs.signatures import NodeSignatures
from lightning_zero.profiling.graph_tensors import tensors_of

__all__ = ["Subgraph", "make_subgraph", "symbol_inputs"]


@dataclass(frozen=True)
class Subgraph:
    """A part of a graph that is compiled by itself.

    Attributes:
        inputs: what it reads, nodes of the whole graph, in the order of the piece's own inputs.
        steps: what it does with them, likewise.
        outputs: what others read of it, likewise.
        signatures: of nodes of the whole graph.
    """

    inputs: tuple[Node, ...]
    steps: tuple[Node, ...]
    outputs: tuple[Node, ...]
    signatures: NodeSignatures = field(default_factory=NodeSignatures, compare=False, repr=False)

    @cached_property
    def graph(self) -> Graph:
        """Of its own: inputs, steps, and a tuple as output. Most pieces are equal to one that has been compiled, and
        need none."""
        graph = Graph()
        copies = {node: _input(graph, node) for node in self.inputs}
        for node in self.steps:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        output = graph.output(tuple(copies[node] for node in self.outputs))
        output.meta["val"] = tuple(node.meta.get("val") for node in self.outputs)
        return graph


def symbol_inputs(graph: Graph) -> list[Node]:
    """Inputs of a whole graph that give symbols in sizes their values."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if isinstance(node.meta.get("val"), SymInt | SymFloat)]


def make_subgraph(
    work: Sequence[Node],
    wanted: Sequence[Node],
    kinds: dict[Node, NodeKind],
    symbols: Sequence[Node],
    signatures: NodeSignatures | None = None,
) -> Subgraph:
    """The piece that does ``work`` and returns ``wanted``, with views and constants of its own.

    Args:
        work: nodes of the whole graph, in order.
        wanted: of these, or views of them, in any order: in what order others read them differs between equal layers.
        kinds: of all nodes of the whole graph.
        symbols: by :func:`symbol_inputs`.
        signatures: of what has been asked for, of the whole graph.
    """
    own, seen = (
        {node: number for number, node in enumerate(work)},
        NodeSignatures() if signatures is None else signatures,
    )
    wanted = _in_order(wanted, own, seen)
    inputs: dict[Node, None] = {}
    steps: dict[Node, None] = {}

    def add(node: Node) -> None:
        """What has to be done before ``node``, and it."""
        for read in node.all_input_nodes:
            if read in own or kinds[read] is NodeKind.VIEW:
                if read not in steps:
                    add(read)
            else:
                inputs[read] = None
        steps[node] = None

    for node in [*work, *wanted]:
        if node not in steps:
            add(node)
    inputs |= dict.fromkeys(_used(symbols, steps, inputs))
    return Subgraph(tuple(inputs), tuple(steps), tuple(wanted), seen)


def _in_order(wanted: Sequence[Node], own: Mapping[Node, int], seen: NodeSignatures) -> list[Node]:
    """Work by its place among ``own``; a view behind what it is a view of, and several of one node by what they do."""
    places = {node: _place(node, own) for node in wanted}
    if len({*places.values()}) < len(places):
        return sorted(wanted, key=lambda node: _worded(node, own, seen))
    return sorted(wanted, key=places.__getitem__)


def _place(node: Node, own: Mapping[Node, int]) -> tuple[int, int]:
    """Place, and how many views behind it."""
    if node in own:
        return own[node], 0
    place, views = max((_place(read, own) for read in node.all_input_nodes), default=(-1, 0))
    return place, views + 1


def _worded(node: Node, own: Mapping[Node, int], seen: NodeSignatures) -> tuple[int, int, str]:
    """And what they do."""
    if node in own:
        return own[node], 0, ""
    place, views, what = max((_worded(read, own, seen) for read in node.all_input_nodes), default=(-1, 0, ""))
    return place, views + 1, f"{what} {seen[node]}"


def _input(graph: Graph, node: Node) -> Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _used(symbols: Sequence[Node], steps: Iterable[Node], inputs: Iterable[Node]) -> list[Node]:
    """Those that sizes and numbers of a piece have in them: Inductor writes a number as the formula of its symbols."""
    if not symbols:
        return []
    used = set()
    for node in [*steps, *inputs]:
        known = node.meta.get("val")
        for value in [known] if isinstance(known, SymInt | SymFloat) else tensors_of(known):
            used |= {str(symbol) for symbol in free_symbols(value)}
    return [node for node in symbols if used & {str(symbol) for symbol in free_symbols(node.meta["val"])}]
