"""Tensors of an FX graph: their sizes, and which nodes share memory.

Everything is read from ``node.meta["val"]`` and the schemas of ops. A symbolic size counts as the size seen while
tracing. Invariant: no function adds a guard, because reading a graph must not change what is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental import symbolic_shapes

from lightning_zero.compat.tensors import (
    FakeTensor,
    OpOverload,
    fake_like,
    no_dispatch_modes,
    no_python_dispatcher,
    tree_leaves,
)

UNKNOWN_SIZE = 1024  # of a size that is known only at run time

# Ops whose results share memory with an input, although their schemas do not say so.
_SAME_MEMORY = {"aten::_unsafe_view", "_c10d_functional::wait_tensor"}


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory that a node allocates, or that a graph's input brings. Compared by identity.

    Attributes:
        name: of the node; ``node[1]`` for the second of several results.
        nbytes: size.
        made: index of the node in the graph.
    """

    name: str
    nbytes: int
    made: int


def size_hint(size: Any) -> int:
    """Return a size as a number, without a guard."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    if isinstance(hint, int):
        return hint
    # torch 2.11 calls it size_hint, torch 2.13 optimization_hint.
    estimate = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint", None)
    try:
        return int(estimate(size, fallback=UNKNOWN_SIZE)) if estimate else UNKNOWN_SIZE
    except Exception:  # an unknown size must not fail a compilation
        return UNKNOWN_SIZE


def tensors_of(value: object) -> list[Tensor]:
    """Return all tensors in a node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: object) -> int:
    """Return the bytes of all tensors in a node's value."""
    total = 0
    for tensor in tensors_of(value):
        elements = tensor.dtype.itemsize
        for size in tensor.shape:
            elements *= size if type(size) is int else size_hint(size)
        total += elements
    return total


def called_op(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op that runs and its arguments.

    In activation checkpointing torch wraps a random op in another one that restores the generator's state.
    """
    if not isinstance(node.target, OpOverload):
        for number, given in enumerate(node.args):
            if isinstance(given, OpOverload):
                return given, node.args[number + 1 :]
    return node.target, node.args


def is_view(node: Node) -> bool:
    """Return True if the node moves no bytes, because its result shares memory with an input."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and is_view_op(target) and view_base(node) is not None


def view_base(node: Node) -> Node | None:
    """Return the input that a node's results share memory with, for views and in-place ops; else None."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], Node) else None
    position = aliased_argument(target) if isinstance(target, OpOverload) else None
    return None if position is None else _argument(node, position)


def aliases_input(node: Node) -> bool:
    """Return True if the node's op may share memory between inputs and results."""
    target = node.target
    return target is operator.getitem or (isinstance(target, OpOverload) and aliased_argument(target) is not None)


def nodes_where(nodes: Iterable[Node], ask: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes for which ``ask`` is True; it is called once for each torch op."""
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
    """Return the memory of each node's results, one entry for each; None for values that are no tensors."""
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
    """Return the bytes that reading a node's result moves; an expanded tensor is read once."""
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


@cache
def aliased_argument(target: OpOverload) -> int | None:
    """Return the position of the argument that an op's result shares memory with; None without one."""
    schema = target._schema
    if schema.name in _SAME_MEMORY:
        return 0
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    return next((number for number, given in enumerate(schema.arguments) if given.alias_info is not None), None)


@cache
def is_view_op(target: OpOverload) -> bool:
    """Return True if an op returns its input's memory and writes nothing."""
    writes = any(given.alias_info is not None and given.alias_info.is_write for given in target._schema.arguments)
    return aliased_argument(target) is not None and not writes


class FakeBuffer:
    """Makes fake tensors that are views of one buffer, without torch's dispatcher.

    The dispatcher takes milliseconds for each new shape, and a graph has a thousand weights in its groups.

    Args:
        like: a value of the dtype and device of the views. If it is no fake tensor, neither are the views.
    """

    def __init__(self, like: Tensor, numel: int) -> None:
        self._like, self.numel = like, numel
        if isinstance(like, FakeTensor):
            with no_dispatch_modes(), no_python_dispatcher():
                self._all = torch.empty(numel, dtype=like.dtype, device="meta")
        else:
            self._all = like.new_empty(numel)

    def part(self, begin: int, shape: Sequence[int]) -> Tensor:
        """Return a contiguous view of ``shape`` that begins at element ``begin``."""
        strides = [1] * len(shape)
        for at in range(len(shape) - 1, 0, -1):
            strides[at - 1] = strides[at] * max(shape[at], 1)
        like = self._like
        if not isinstance(like, FakeTensor):
            return self._all.as_strided(shape, strides, begin)
        with no_dispatch_modes(), no_python_dispatcher():
            return fake_like(like, self._all.as_strided(shape, strides, begin))
