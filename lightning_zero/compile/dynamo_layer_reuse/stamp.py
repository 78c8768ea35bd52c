"""Copies the nodes that were traced of one module for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    ConstantVariable,
    TupleVariable,
    wrap_proxy,
)
from lightning_zero.compat.fakes import fake_like
from lightning_zero.compat.graphs import CUSTOM, EXAMPLE_VALUE, GRAPH_ARG, SOURCE_FN_STACK
from lightning_zero.compat.ops import unsafe_view
from lightning_zero.compat.tensors import FakeTensor, no_python_dispatcher, no_dispatch_modes
from lightning_zero.compile.dynamo_layer_reuse.call_signature import Given, form_of
from lightning_zero.compile.dynamo_layer_reuse.layer_inputs import look_at_numbers, taken_in
from lightning_zero.compile.dynamo_layer_reuse.node_names import Names
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import Passed
from lightning_zero.compile.capture.dynamo_graph import storage_key, mutated_inputs

__all__ = ["Nodes", "calls_behind", "stamp"]

# Calls that change more of a tensor than its values.
RESHAPING = {"requires_grad_", "set_", "resize_", "resize_as_", "detach_", "t_", "transpose_", "swapaxes_", "squeeze_",
             "unsqueeze_", "as_strided_", "rename_", "data", "set_data", "register_hook", "retain_grad"}  # fmt: skip


@dataclass(frozen=True)
class Nodes:
    """What was made of a call.

    Attributes:
        own: its nodes, in order.
        inputs: of the graph, that these read.
        result: the call's, as Dynamo's variable.
    """

    own: Sequence[Node]
    inputs: Sequence[Node]
    result: Any

    @classmethod
    def of(cls, own: Sequence[Node], result: Any, given: Given) -> Nodes:
        """
        Raises:
            Unlike: among it is something that cannot be copied.
        """
        inside = set(own)
        for node in own:
            _check(node, inside)
        outside = dict.fromkeys(read for node in own for read in node.all_input_nodes if read not in inside)
        inputs = [node for node in outside if node not in given.nodes]
        for node in inputs:
            if node.op != "placeholder" or node.meta[GRAPH_ARG].source is None:
                raise Unlike(f"it reads {node}, which it is not given")
            form_of(node.meta[EXAMPLE_VALUE])
        _check_result(result, inside.union(given.nodes))
        return cls(own, inputs, result)


def calls_behind(graph: Graph, last: Node | None) -> list[Node]:
    """In order; inputs are put in front of what is there, or behind other inputs."""
    found = [
        node for node in takewhile(lambda node: node is not last, reversed(graph.nodes)) if node.op != "placeholder"
    ]
    return found[::-1]


def _check(node: Node, inside: set[Node]) -> None:
    if node.op not in ("call_function", "call_method"):
        raise Unlike(f"{node} is a {node.op}")
    if not all(written in inside for written in mutated_inputs(node)):
        raise Unlike(f"{node} writes to what it is given")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in RESHAPING:
        raise Unlike(f"{node} changes more than values")
    for value in _leaves(node.meta.get(EXAMPLE_VALUE)):
        if isinstance(value, Tensor):
            form_of(value)
            if getattr(value, "constant", None) is not None:
                raise Unlike("a tensor's value is known")
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise Unlike("sizes are symbols")


def _check_result(result: Any, known: set[Node]) -> None:
    if type(result) is TupleVariable:
        for item in result.items:
            _check_result(item.realize(), known)
    elif type(result) is TensorVariable:
        if result.as_proxy().node not in known:
            raise Unlike("it returns what it has not made")
    elif not isinstance(result, ConstantVariable):
        raise Unlike(f"it returns {type(result).__name__}")


def _leaves(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def stamp(
    tx: Any,
    nodes: Nodes,
    passed: Passed,
    paired: Mapping[Node, Any],
    modules: tuple[Any, Any],
) -> Any:
    """Puts them into the graph once more, for another module; the result is Dynamo's variable.

    Args:
        tx: Dynamo's translator.
        nodes: of the module that was traced.
        passed: what is known of the other one, which passes its guards.
        paired: what it was given, and what the other one is given there, as Dynamo's variables.
        modules: both, as Dynamo's variables.

    Raises:
        Unlike: an input of the graph would not be what it is for the module that was traced.
    """
    look_at_numbers(tx, passed)
    names = Names(*modules)
    new: dict[Node, Node] = {node: variable.as_proxy().node for node, variable in paired.items()}
    new |= taken_in(tx, nodes.inputs, passed, names)
    memory = _Memory(new)
    tracer = tx.output.current_tracer
    wanted = {node for node in _result_nodes(nodes.result) if node not in new}
    with no_dispatch_modes(), no_python_dispatcher():  # values are made on purpose
        for node in nodes.own:
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = copy = tracer.create_node(node.op, node.target, args, kwargs, _base(node.name), node.type)
            own = {name: note for name, note in copy.meta.items() if name != CUSTOM}
            copy.meta = names.renamed(node.meta | own)
            if SOURCE_FN_STACK in node.meta:
                copy.meta[SOURCE_FN_STACK] = [*node.meta[SOURCE_FN_STACK][:-1], (copy.name, node.meta[SOURCE_FN_STACK][-1][1])]
            if EXAMPLE_VALUE in node.meta:
                copy.meta[EXAMPLE_VALUE] = memory.made_anew(node.meta[EXAMPLE_VALUE])
    variables = dict(paired)
    for node in wanted:
        variables[node] = _variable(tx, Proxy(new[node], tracer), node.meta[EXAMPLE_VALUE])
    return _result(nodes.result, variables)


def _base(name: str) -> str:
    """Without its number, from which on torch would try one after the other."""
    base, _, number = name.rpartition("_")
    return base if base and number.isdecimal() else name


def _variable(tx: Any, proxy: Proxy, like: Tensor) -> Any:
    value = proxy.node.meta.pop(EXAMPLE_VALUE)
    if value.requires_grad and not like.is_leaf:
        with value.fake_mode, torch.enable_grad():
            # A result of something, and no view of a leaf, which nobody may write into.
            value = unsafe_view(value, value.shape)
    return wrap_proxy(tx, proxy, value)


def _result_nodes(result: Any) -> list[Node]:
    if type(result) is TupleVariable:
        return [node for item in result.items for node in _result_nodes(item.realize())]
    return [result.as_proxy().node] if type(result) is TensorVariable else []


def _result(result: Any, variables: Mapping[Node, Any]) -> Any:
    if type(result) is TupleVariable:
        return TupleVariable([_result(item.realize(), variables) for item in result.items])
    if type(result) is TensorVariable:
        return variables[result.as_proxy().node]
    return ConstantVariable.create(result.as_python_constant())


class _Memory:
    """Fake tensors for the copies, which share memory with each other as the originals do."""

    def __init__(self, given: Mapping[Node, Node]) -> None:
        self._places: dict[int, set[tuple[Any, int]]] = defaultdict(set)  # the memory, and by how much it moved in it
        for old, new in given.items():
            one, other = old.meta[EXAMPLE_VALUE], new.meta[EXAMPLE_VALUE]
            self._places[storage_key(one)].add((other.untyped_storage(), _begin(other) - _begin(one)))

    def made_anew(self, value: Any) -> Any:
        """
        Raises:
            Unlike: it is a view of memory that moved to several places.
        """
        if isinstance(value, tuple | list):
            return type(value)(self.made_anew(item) for item in value)
        if not isinstance(value, FakeTensor):
            return value
        places = self._places[storage_key(value)]
        if not places:
            size = value.untyped_storage().nbytes()
            places.add((torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage(), 0))
        if len(places) > 1:
            raise Unlike("it makes views of memory that inputs share")
        [(storage, moved)] = places
        made = torch.empty(0, dtype=value.dtype, device="meta")
        made.set_(storage, (_begin(value) + moved) // value.itemsize, value.shape, value.stride())
        return fake_like(value, made).requires_grad_(value.requires_grad)


def _begin(value: Tensor) -> int:
    return int(value.storage_offset()) * value.itemsize
