"""A part of a graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import SymFloat, SymInt
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from lightning_zero.compile.pieces.kinds import Kind, signature
from lightning_zero.profiling.tensors import tensors_of

__all__ = ["Piece", "make_piece", "symbol_inputs"]


@dataclass(frozen=True)
class Piece:
    """A part of a graph that is compiled by itself.

    Attributes:
        graph: of its own: inputs, work, and a tuple as output.
        inputs: what it reads, nodes of the whole graph, in the order of the piece's own inputs.
        outputs: what others read of it, likewise.
    """

    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def symbol_inputs(graph: Graph) -> list[Node]:
    """Inputs of a whole graph that give symbols in sizes their values."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if isinstance(node.meta.get("val"), SymInt | SymFloat)]


def make_piece(work: Sequence[Node], wanted: Sequence[Node], kinds: dict[Node, Kind], symbols: Sequence[Node]) -> Piece:
    """The piece that does ``work`` and returns ``wanted``, with views and constants of its own.

    Args:
        work: nodes of the whole graph, in order.
        wanted: of these, or views of them, in any order: in what order others read them differs between equal layers.
        kinds: of all nodes of the whole graph.
        symbols: by :func:`symbol_inputs`.
    """
    graph = Graph()
    own = {node: number for number, node in enumerate(work)}
    wanted = sorted(wanted, key=lambda node: _place(node, own))
    inputs: dict[Node, Node] = {}
    copies: dict[Node, Node] = {}

    def order(node: Node) -> Iterator[Node]:
        """What has to be copied before ``node``, and it."""
        for read in node.all_input_nodes:
            if read not in copies and read not in inputs:
                if read in own or kinds[read] is Kind.FREE:
                    yield from order(read)
                else:
                    inputs[read] = read
        if node not in copies:
            yield node

    def reads() -> list[Node]:
        steps: list[Node] = []
        for node in [*work, *wanted]:
            for needed in order(node):
                copies[needed] = needed
                steps.append(needed)
        return steps

    steps = reads()
    copies.clear()
    for symbol in _used(symbols, steps, inputs):
        inputs.setdefault(symbol, symbol)
    for node in inputs:
        copies[node] = _input(graph, node)
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in wanted))
    output.meta["val"] = tuple(node.meta.get("val") for node in wanted)
    return Piece(graph, tuple(inputs), tuple(wanted))


def _place(node: Node, own: Mapping[Node, int]) -> tuple[int, int, str]:
    """Of work among ``own``; of a view behind what it is a view of, by what it does."""
    if node in own:
        return own[node], 0, ""
    place, views, what = max((_place(read, own) for read in node.all_input_nodes), default=(-1, 0, ""))
    return place, views + 1, f"{what} {signature(node)}"


def _input(graph: Graph, node: Node) -> Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _used(symbols: Sequence[Node], steps: Sequence[Node], inputs: Iterable[Node]) -> list[Node]:
    """Those that sizes of a piece have in them."""
    if not symbols:
        return []
    used = set()
    for node in [*steps, *inputs]:
        for value in tensors_of(node.meta.get("val")):
            used |= {str(symbol) for symbol in free_symbols(value)}
    return [node for node in symbols if used & {str(symbol) for symbol in free_symbols(node.meta["val"])}]
