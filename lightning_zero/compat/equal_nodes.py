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

__all__ = ["merging_in_place"]


@contextmanager
def merging_in_place() -> Iterator[None]:
    """Inside, the partitioner takes the second of two equal nodes out of a graph. By itself it copies the graph without
    it, and nearly all other nodes of a layer are no other's equal."""
    # Makes the copy. (torch 2.11+)
    with patch.object(partitioners, "fx_graph_cse", _merged):
        yield


def _merged(graph: Graph) -> Graph:
    # Numbers nodes by the writes into tensors before them: nodes with one between them are not equal. (torch 2.11+)
    pattern_matcher.compute_mutation_region_ids(graph)  # type: ignore[arg-type]
    returned = _memory_of_results(graph)
    first: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if not _may_have_equals(node) or _memory(node) in returned:
            continue
        try:
            key = node.target, _value(node.args), _value(node.kwargs)
            same = first.get(key)
        except TypeError:  # nothing that can be looked up
            continue
        # Whether there is no write between the two. (torch 2.11+)
        if same is not None and pattern_matcher.same_mutation_regions(node, same):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        else:
            first[key] = node
    return graph


def _memory_of_results(graph: Graph) -> set[int]:
    """Results of equal nodes are tensors of their own to whoever gets them, and to whoever writes into them."""
    return {_memory(node) for node in graph.output_node().all_input_nodes} - {0}


def _memory(node: Node) -> int:
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0
    except NotImplementedError:  # sparse
        return 0


def _may_have_equals(node: Node) -> bool:
    if node.op != "call_function" or isinstance(node.meta.get("val"), sympy.Symbol):
        return False
    # An op without its overload, and those that draw numbers. (torch 2.11+)
    target = compile_utils.get_aten_target(node)
    return target not in compile_utils.rand_ops and target is not torch.ops.aten.empty


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
