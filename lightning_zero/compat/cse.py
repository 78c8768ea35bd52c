"""How torch's partitioner makes one of equal nodes of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.lookup import module
from lightning_zero.compat.ops import OpOverload
from lightning_zero.compat.patches import Patch, swap_attribute

compile_utils = module("torch._functorch.compile_utils")
partitioners = module("torch._functorch.partitioners")
auto_functionalize = module("torch._higher_order_ops.auto_functionalize")
triton_kernel_wrap = module("torch._higher_order_ops.triton_kernel_wrap")
pattern_matcher = module("torch._inductor.pattern_matcher")

__all__ = ["cse_in_place"]

_MERGE = Patch(
    "equal nodes of a joint graph are merged without a copy of it",
    {
        # Makes the copy. (torch 2.11+)
        "torch._functorch.partitioners.fx_graph_cse": ("fx_g", "fx_g, extra_node_key"),
    },
    needs=(
        # Compare two nodes for writes between them, and tell nodes that write. (torch 2.11+)
        "torch._inductor.pattern_matcher.same_mutation_regions",
        "torch._inductor.pattern_matcher.is_mutation_op",
        # An op without its overload, and those that draw numbers. (torch 2.11+)
        "torch._functorch.compile_utils.get_aten_target",
        "torch._functorch.compile_utils.rand_ops",
        # The names of the arguments that an op writes to. (torch 2.11+)
        "torch._higher_order_ops.auto_functionalize.get_mutable_args",
    ),
)


@_MERGE
@contextmanager
def cse_in_place() -> Iterator[None]:
    """Inside, the partitioner takes the second of two equal nodes out of a graph. By itself it copies the graph without
    it, and nearly all other nodes of a layer are no other's equal."""
    with swap_attribute(partitioners, "fx_graph_cse", _merged):
        yield


def _merged(graph: Graph, extra_node_key: Callable[[Node], Hashable] | None = None) -> Graph:
    """Merge equal nodes in place, by the rules of the newest torch.

    Args:
        extra_node_key: torch 2.14 gives the partitioner's: only nodes for which it returns equal values are merged, so
            that a value that forward alone uses does not become one that is saved for backward.
    """
    _number_writes(graph)
    written = _bases_of_writes(graph)
    returned = _memory_of_results(graph)
    first: dict[Hashable, Node] = {}
    alone: dict[int, bool] = {}  # by ids of what is called
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta.get("val"), sympy.Symbol):
            continue
        called = id(node.target)
        if called not in alone:
            alone[called] = _has_no_equals(node)
        if alone[called] or node in written or (not isinstance(node.target, OpOverload) and node.is_impure()):
            continue
        try:
            given = [argument if type(argument) is Node else _value(argument) for argument in node.args]
            apart = extra_node_key(node) if extra_node_key else None, *_stream(node)
            key = called, apart, *given, _value(node.kwargs) if node.kwargs else None
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


def _bases_of_writes(graph: Graph) -> set[Node]:
    """Return nodes into whose memory an op writes that is functional in the graph: each needs memory of its own."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            found.update(_nodes(node.kwargs.get("_all_bases", ())))
        elif node.target is torch.ops.higher_order.auto_functionalized:
            # The names of the arguments that an op writes to. (torch 2.11+)
            names, _ = auto_functionalize.get_mutable_args(node.args[0])
            found.update(_nodes([node.kwargs.get(name) for name in names]))
        elif node.target is triton_kernel_wrap.triton_kernel_wrapper_functional:
            given = node.kwargs.get("kwargs", {})
            found.update(_nodes([given.get(name) for name in node.kwargs.get("tensors_to_clone", ())]))
    return found


def _nodes(values: Any) -> list[Node]:
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, Node)]


def _stream(node: Node) -> tuple[Hashable, ...]:
    """Return the stream and the memory pool that a node runs in, where the graph says so."""
    custom = node.meta.get("custom", {})
    return custom.get("stream", 0), custom.get("mempool"), custom.get("mempool_device")


def _has_no_equals(node: Node) -> bool:
    # An op without its overload, and those that draw numbers. (torch 2.11+)
    target = compile_utils.get_aten_target(node)
    drawn = target in compile_utils.rand_ops or target is torch.ops.aten.empty
    return drawn or (isinstance(node.target, OpOverload) and node.is_impure())


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
