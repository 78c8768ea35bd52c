"""A part of a graph as a graph of its own, and node signatures that compare such parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Generator, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from lightning_zero.compile.subgraphs.node_kinds import NodeKind
from lightning_zero.profiling.graph_tensors import tensors_of

# Replaces a node in the text of arguments. A string argument that contains it only costs a second check.
_READ = "<- "


class NodeSignatures(dict[Node, tuple[str, str, str]]):
    """Target, arguments and layout of each node: equal for nodes of equal effect on inputs of equal sizes.

    Valid while inputs and recorded values of the nodes do not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes = _Shapes()
        self._targets: dict[int, str] = {}  # by id; the nodes keep the targets alive

    def __missing__(self, node: Node) -> tuple[str, str, str]:
        key = id(node.target)
        if key not in self._targets:
            self._targets[key] = str(node.target)
        constants = torch.fx.map_arg((node.args, node.kwargs), self._shapes.__getitem__)
        found = self[node] = self._targets[key], str(constants), self._shapes[node]
        return found

    def value(self, node: Node, number_of: Callable[[Any], int]) -> Hashable:
        """Return the properties of a value that generated code depends on."""
        noted = self._shapes[node]
        if node in self._shapes.symbolic:
            return _described(node.meta.get("val"), number_of)
        value: Tensor = node.meta["val"]
        offset: Any = value.storage_offset()
        if type(offset) is not int:
            return _described(value, number_of)
        return noted, offset * value.dtype.itemsize % 16

    def reads(self, node: Node, names: dict[Node, int]) -> tuple[int, ...]:
        """Return the inputs of a node; with its signature they determine the call.

        Args:
            names: numbers of nodes.
        """
        inputs = node.all_input_nodes
        found = tuple(map(names.__getitem__, inputs))
        if self[node][1].count(_READ) == len(inputs):
            return found
        again: list[int] = []  # one that is read twice may be at other positions in other nodes
        torch.fx.map_arg((node.args, node.kwargs), lambda read: again.append(names[read]))
        return *found, *again


class _Shapes(dict[Node, str]):
    """Layout of each node's value.

    Attributes:
        symbolic: nodes with symbolic sizes, or whose values are not tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[Hashable, str] = {}
        self.symbolic: set[Node] = set()

    def __missing__(self, node: Node) -> str:
        found: str | None = None
        if "val" in node.meta and isinstance(value := node.meta["val"], Tensor):
            key = value.dtype, value.shape, value.stride(), value.device
            try:
                if key not in self._cache:
                    self._cache[key] = _READ + shape(node)
                found = self._cache[key]
            except TypeError:  # symbols are not hashable
                pass
        if found is None:
            self.symbolic.add(node)
            found = _READ + shape(node)
        self[node] = found
        return found


def signature(node: Node) -> Hashable:
    return NodeSignatures()[node]


def shape(node: Node) -> str:
    """Return the layout for which code is generated."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, Generator):  # each op has its own, whose text contains an address
        return f"generator on {value.device}"
    return str(value) if not isinstance(value, list | tuple) else str(len(value))


def _described(value: Any, number_of: Callable[[Any], int]) -> str:
    if isinstance(value, Tensor):
        offset: Any = value.storage_offset()
        begins = offset * value.dtype.itemsize % 16 if isinstance(offset, int) else offset
        symbols = _symbolic(value.shape, number_of)
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{begins}{symbols}"
    if isinstance(value, Generator):
        return f"generator on {value.device}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_described(part, number_of) for part in value) + "]"
    return f"{value}{_symbolic([value], number_of)}"


def _symbolic(sizes: Sequence[Any], number_of: Callable[[Any], int]) -> str:
    """Symbols of equal names from different traces differ."""
    known = {number_of(size.node.shape_env) for size in sizes if isinstance(size, SymInt | SymFloat)}  # type: ignore[union-attr]
    return str(sorted(known)) if known else ""


@dataclass(frozen=True)
class Subgraph:
    """A part of a graph that is compiled separately.

    Attributes:
        inputs: nodes of the whole graph, in the order of the subgraph's inputs.
        steps: nodes of the whole graph, in execution order.
        outputs: nodes of the whole graph that others read.
    """

    inputs: tuple[Node, ...]
    steps: tuple[Node, ...]
    outputs: tuple[Node, ...]
    signatures: NodeSignatures = field(default_factory=NodeSignatures, compare=False, repr=False)

    @cached_property
    def graph(self) -> Graph:
        """Return the graph; most subgraphs equal a compiled one and need none."""
        graph = Graph()
        copies = {node: _input(graph, node) for node in self.inputs}
        for node in self.steps:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        output = graph.output(tuple(copies[node] for node in self.outputs))
        output.meta["val"] = tuple(node.meta.get("val") for node in self.outputs)
        return graph


def symbol_inputs(graph: Graph) -> list[Node]:
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if isinstance(node.meta.get("val"), SymInt | SymFloat)]


def make_subgraph(
    work: Sequence[Node],
    outputs: Sequence[Node],
    kinds: dict[Node, NodeKind],
    symbols: Sequence[Node],
    signatures: NodeSignatures | None = None,
) -> Subgraph:
    """Return the subgraph of ``work`` with its own copies of views and constants.

    Args:
        wanted: outputs, which may be views. Their order is normalized, since it differs between equal layers.
    """
    own, seen = (
        {node: number for number, node in enumerate(work)},
        NodeSignatures() if signatures is None else signatures,
    )
    outputs = _in_order(outputs, own, seen)
    inputs: dict[Node, None] = {}
    steps: dict[Node, None] = {}

    def add(node: Node) -> None:
        """Add a node after all that it needs."""
        for read in node.all_input_nodes:
            if read in own or kinds[read] is NodeKind.VIEW:
                if read not in steps:
                    add(read)
            else:
                inputs[read] = None
        steps[node] = None

    for node in [*work, *outputs]:
        if node not in steps:
            add(node)
    inputs |= dict.fromkeys(_used_symbols(symbols, steps, inputs))
    return Subgraph(tuple(inputs), tuple(steps), tuple(outputs), seen)


def _in_order(outputs: Sequence[Node], own: Mapping[Node, int], seen: NodeSignatures) -> list[Node]:
    """Sort by position in ``own``, then by number of views, then by their signatures."""
    places = {node: _place(node, own) for node in outputs}
    if len({*places.values()}) < len(places):
        return sorted(outputs, key=lambda node: _sort_key(node, own, seen))
    return sorted(outputs, key=places.__getitem__)


def _place(node: Node, own: Mapping[Node, int]) -> tuple[int, int]:
    if node in own:
        return own[node], 0
    place, views = max((_place(read, own) for read in node.all_input_nodes), default=(-1, 0))
    return place, views + 1


def _sort_key(node: Node, own: Mapping[Node, int], seen: NodeSignatures) -> tuple[int, int, str]:
    """Return the position, the number of views after it, and their signatures."""
    if node in own:
        return own[node], 0, ""
    place, views, what = max((_sort_key(read, own, seen) for read in node.all_input_nodes), default=(-1, 0, ""))
    return place, views + 1, f"{what} {seen[node]}"


def _input(graph: Graph, node: Node) -> Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _used_symbols(symbols: Sequence[Node], steps: Iterable[Node], inputs: Iterable[Node]) -> list[Node]:
    """Return symbols used in sizes and numbers; Inductor writes numbers as formulas of symbols."""
    if not symbols:
        return []
    used = set()
    for node in [*steps, *inputs]:
        known = node.meta.get("val")
        for value in [known] if isinstance(known, SymInt | SymFloat) else tensors_of(known):
            used |= {str(symbol) for symbol in free_symbols(value)}
    return [node for node in symbols if used & {str(symbol) for symbol in free_symbols(node.meta["val"])}]
