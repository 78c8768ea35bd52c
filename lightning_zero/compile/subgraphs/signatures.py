"""What tells a node of a graph from others: found once for each node, however many steps of cutting ask for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Generator, SymFloat, SymInt, Tensor
from torch.fx import Node

__all__ = ["NodeSignatures", "shape", "signature"]

# Stands where a node is read; an argument that is a text with it in it is looked at once more, for nothing.
_READ = "<- "


class NodeSignatures(dict[Node, tuple[str, str, str]]):
    """By node: equal for nodes that do the same with inputs of the same sizes, wherever these come from.

    Holds for as long as nobody changes what nodes read, or what is noted of their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes = _Shapes()
        self._targets: dict[int, str] = {}  # by id: the nodes are there for as long

    def __missing__(self, node: Node) -> tuple[str, str, str]:
        key = id(node.target)
        if key not in self._targets:
            self._targets[key] = str(node.target)
        constants = torch.fx.map_arg((node.args, node.kwargs), self._shapes.__getitem__)
        found = self[node] = self._targets[key], str(constants), self._shapes[node]
        return found

    def value(self, node: Node, number_of: Callable[[Any], int]) -> Hashable:
        """What of a node's value the code goes by that is generated for whatever reads it.

        Args:
            number_of: gives numbers to what no text describes, see :class:`~.lower.SubgraphCache`.
        """
        noted = self._shapes[node]
        if node in self._shapes.symbolic:
            return _described(node.meta.get("val"), number_of)
        value: Tensor = node.meta["val"]
        offset: Any = value.storage_offset()
        if type(offset) is not int:
            return _described(value, number_of)
        return noted, offset * value.dtype.itemsize % 16

    def reads(self, node: Node, names: dict[Node, int]) -> tuple[int, ...]:
        """Which nodes it reads: with its signature, what it is given.

        Args:
            names: of the nodes.
        """
        inputs = node.all_input_nodes
        found = tuple(map(names.__getitem__, inputs))
        if self[node][1].count(_READ) == len(inputs):
            return found
        again: list[int] = []  # one that is read twice may stand at other places in others
        torch.fx.map_arg((node.args, node.kwargs), lambda read: again.append(names[read]))
        return *found, *again


class _Shapes(dict[Node, str]):
    """By node.

    Attributes:
        symbolic: those whose sizes have symbols in them, or that are no tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, str] = {}
        self.symbolic: set[Node] = set()

    def __missing__(self, node: Node) -> str:
        found: str | None = None
        if "val" in node.meta and isinstance(value := node.meta["val"], Tensor):
            key = value.dtype, value.shape, value.stride(), value.device
            try:
                if key not in self._known:
                    self._known[key] = _READ + shape(node)
                found = self._known[key]
            except TypeError:  # symbols have no hash
                pass
        if found is None:
            self.symbolic.add(node)
            found = _READ + shape(node)
        self[node] = found
        return found


def signature(node: Node) -> Hashable:
    """Of one node."""
    return NodeSignatures()[node]


def shape(node: Node) -> str:
    """What of a node's value code is generated for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, Generator):  # each op has one of its own; its words say where in memory it lies
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
    """Symbols of the same name in graphs traced at different times are others."""
    known = {number_of(size.node.shape_env) for size in sizes if isinstance(size, SymInt | SymFloat)}  # type: ignore[union-attr]
    return str(sorted(known)) if known else ""
