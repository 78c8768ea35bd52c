"""What the nodes of an FX graph hold: sizes of tensors, and which nodes share memory.

Everything is read off ``node.meta["val"]`` and the ops' schemas. Symbolic sizes count as the size that was seen when
the graph was traced. Nothing here adds a guard: looking at a graph must not change what is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental import symbolic_shapes

from lightning_zero.compat.tensors import OpOverload
from lightning_zero.compat.tensors import tree_leaves

__all__ = [
    "Storage",
    "aliases_input",
    "called_op",
    "is_view",
    "nbytes",
    "read_bytes",
    "aliased_argument",
    "size_hint",
    "storages",
    "tensors_of",
    "nodes_where",
    "view_base",
    "is_view_op",
]

UNKNOWN_SIZE = 1024  # stands for a size that only running the graph would tell

# Their results are their inputs' memory, though their schemas do not say so.
_SAME_MEMORY = {"aten::_unsafe_view", "_c10d_functional::wait_tensor"}


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory that one node allocates, or that comes in with a graph's input. Compared by identity.

    Attributes:
        name: of the node; ``node[1]`` for the second of several results.
        nbytes: its size.
        made: index, among the graph's nodes, of the node.
    """

    name: str
    nbytes: int
    made: int


def size_hint(size: Any) -> int:
    """A size as a number."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    if isinstance(hint, int):
        return hint
    # torch 2.11 calls it size_hint, torch 2.13 optimization_hint.
    estimate = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint", None)
    try:
        return int(estimate(size, fallback=UNKNOWN_SIZE)) if estimate else UNKNOWN_SIZE
    except Exception:  # a size that nobody can tell must not end a compilation
        return UNKNOWN_SIZE


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in a node's value or in its arguments' values."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: object) -> int:
    """Bytes of the elements of all tensors in a node's value."""
    total = 0
    for tensor in tensors_of(value):
        elements = tensor.dtype.itemsize
        for size in tensor.shape:
            elements *= size if type(size) is int else size_hint(size)
        total += elements
    return total


def called_op(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that runs, and its arguments. Where backward draws the random numbers of forward again, as in activation
    checkpointing, torch has another op run it, with the state of the generator."""
    if not isinstance(node.target, OpOverload):
        for number, given in enumerate(node.args):
            if isinstance(given, OpOverload):
                return given, node.args[number + 1 :]
    return node.target, node.args


def is_view(node: Node) -> bool:
    """Whether running the node moves nothing: its result is part of what is there already."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and is_view_op(target) and view_base(node) is not None


def view_base(node: Node) -> Node | None:
    """The input that a node's results share memory with, if they do: views, and ops that write in place."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], Node) else None
    position = aliased_argument(target) if isinstance(target, OpOverload) else None
    return None if position is None else _argument(node, position)


def aliases_input(node: Node) -> bool:
    """Whether results share memory with what a node is given, by what it calls: an op that nothing has this of is no
    view, and writes nothing in place."""
    target = node.target
    return target is operator.getitem or (isinstance(target, OpOverload) and aliased_argument(target) is not None)


def nodes_where(nodes: Iterable[Node], ask: Callable[[Node], bool]) -> set[Node]:
    """Of which it is so, where that is so of all that call the same op of torch, which is asked once."""
    known: dict[int, bool] = {}
    found: set[Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        key = id(node.target)
        if key in known:
            yes = known[key]
        else:
            yes = ask(node)
            if isinstance(node.target, OpOverload):
                known[key] = yes
        if yes:
            found.add(node)
    return found


def storages(graph: Graph) -> dict[Node, tuple[Storage | None, ...]]:
    """The memory of each node's results, one entry for each; None for what is no tensor."""
    held: dict[Node, tuple[Storage | None, ...]] = {}
    aliasing = nodes_where(graph.nodes, aliases_input)
    for index, node in enumerate(graph.nodes):
        value, source = node.meta.get("val"), view_base(node) if node in aliasing else None
        base = held.get(source) if source is not None else None
        if base is None or not any(base):
            results = list(value) if isinstance(value, tuple | list) else [value]
            held[node] = tuple([_made(node, number, result, index) for number, result in enumerate(results)])
        elif node.target is operator.getitem:
            chosen = node.args[1]
            held[node] = (base[chosen] if isinstance(chosen, int) and chosen < len(base) else base[0],)
        elif isinstance(value, tuple | list):
            held[node] = tuple(base[0] if isinstance(result, Tensor) else None for result in value)
        else:
            held[node] = (base[0] if isinstance(value, Tensor) else None,)
    return held


def read_bytes(node: Node, storage: Storage | None) -> int:
    """Bytes that reading a node's result takes: an expanded tensor is read once, not once per copy."""
    size = nbytes(node.meta.get("val"))
    return size if storage is None else min(size, storage.nbytes)


def _made(node: Node, number: int, result: object, index: int) -> Storage | None:
    if node.op == "output" or not tensors_of(result):
        return None
    return Storage(f"{node.name}[{number}]" if number else node.name, nbytes(result), index)


def _argument(node: Node, position: int) -> Node | None:
    target: Any = node.target
    args = node.args
    value = args[position] if position < len(args) else node.kwargs.get(target._schema.arguments[position].name)
    return value if isinstance(value, Node) else None


# Of each op once: a graph of many layers asks for the same few of thousands of nodes, several times.
@cache
def aliased_argument(target: OpOverload) -> int | None:
    """Which of an op's arguments its result shares memory with."""
    schema = target._schema
    if schema.name in _SAME_MEMORY:
        return 0
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    return next((number for number, given in enumerate(schema.arguments) if given.alias_info is not None), None)


@cache
def is_view_op(target: OpOverload) -> bool:
    """Whether an op's result is its input's memory, in which it writes nothing."""
    writes = any(given.alias_info is not None and given.alias_info.is_write for given in target._schema.arguments)
    return aliased_argument(target) is not None and not writes
