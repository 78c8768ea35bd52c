"""How torch's partitioner makes one of equal nodes of a joint graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch._functorch import compile_utils, partitioners
from torch._inductor import pattern_matcher
from torch.fx import Graph, Node

from lightning_zero.compat.ops import OpOverload

__all__ = ["merging_in_place"]


@contextmanager
def merging_in_place() -> Iterator[None]:
    """Inside, the partitioner takes the second of two equal nodes out of a graph. By itself it copies the graph without
    it, and nearly all other nodes of a layer are no other's equal."""
    # Makes the copy. (torch 2.11+)
    with patch.object(partitioners, "fx_graph_cse", _merged):
        yield


def _merged(graph: Graph) -> Graph:
    _number_writes(graph)
    returned = _memory_of_results(graph)
    first: dict[Hashable, Node] = {}
    alone: dict[int, bool] = {}  # by ids of what is called
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta.get("val"), sympy.Symbol):
            continue
        called = id(node.target)
        if called not in alone:
            alone[called] = _has_no_equals(node)
        if alone[called]:
            continue
        try:
            given = [argument if type(argument) is Node else _value(argument) for argument in node.args]
            key = called, *given, _value(node.kwargs) if node.kwargs else None
            same = first.get(key)
        except TypeError:  # nothing that can be looked up
            continue
        # Results of equal nodes are tensors of their own to whoever gets them, and to whoever writes into them.
        if same is not None and _memory(node) in returned:
            continue
        # Whether there is no write between the two. (torch 2.11+)
        if same is None or _memory(same) in returned or not pattern_matcher.same_mutation_regions(node, same):
            first[key] = node
        else:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return graph


def _number_writes(graph: Graph) -> None:
    """As torch does: numbers nodes by the writes into tensors before them. Nodes with one between them are not
    equal."""
    number, writes = 0, dict[int, bool]()
    for node in graph.nodes:
        called = id(node.target)
        if called not in writes or not isinstance(node.target, OpOverload):
            # What it does with each node; of ops the schema says it. (torch 2.11+)
            writes[called] = pattern_matcher.is_mutation_op(node)
        number += writes[called]
        node.meta["mutation_region_id"] = number


def _memory_of_results(graph: Graph) -> set[int]:
    return {_memory(node) for node in graph.output_node().all_input_nodes} - {0}


def _memory(node: Node) -> int:
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0
    except NotImplementedError:  # sparse
        return 0


def _has_no_equals(node: Node) -> bool:
    # An op without its overload, and those that draw numbers. (torch 2.11+)
    target = compile_utils.get_aten_target(node)
    return target in compile_utils.rand_ops or target is torch.ops.aten.empty


def _value(argument: Any) -> Hashable:
    """Equal for equal arguments alone: to Python 1 is 1.0 and True, and 0.0 is -0.0."""
    kind = type(argument)
    if kind is Node:
        return argument
    if isinstance(argument, tuple | list):
        return kind, *map(_value, argument)
    if isinstance(argument, dict):
        return kind, *((key, _value(value)) for key, value in argument.items())
    if kind is float:
        return kind, argument.hex()
    if kind is complex:
        return kind, argument.real.hex(), argument.imag.hex()
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return kind, argument.node
    return kind, argument
