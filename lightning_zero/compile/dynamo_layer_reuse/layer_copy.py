"""Copies the nodes that were traced of one module for another one, with its inputs and guards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    ConstantVariable,
    Guard,
    Source,
    TupleVariable,
    VariableBuilder,
    guard_name,
    has_changed_before,
    path_in_modules,
    wrap_proxy,
)
from lightning_zero.compat.graphs import (
    CUSTOM,
    EXAMPLE_VALUE,
    GRAPH_ARG,
    NN_MODULE_STACK,
    SOURCE_FN_STACK,
    STACK_TRACE,
)
from lightning_zero.compat.tensors import (
    SYMBOLIC,
    FakeTensor,
    fake_like,
    layout_key,
    no_dispatch_modes,
    no_python_dispatcher,
    size_key,
    storage_key,
    unsafe_view,
)
from lightning_zero.compile.capture.dynamo_graph import mutated_inputs
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import MatchedGuards
from lightning_zero.compile.dynamo_layer_reuse.trace_inputs import CallSignature, ReuseRejected, fake_layout

# Calls that change more of a tensor than its values.
CHANGE_METADATA = {
    "requires_grad_", "set_", "resize_", "resize_as_", "detach_", "t_", "transpose_", "swapaxes_", "squeeze_",
    "unsqueeze_", "as_strided_", "rename_", "data", "set_data", "register_hook", "retain_grad",
}  # fmt: skip


@dataclass(frozen=True)
class LayerNodes:
    """Nodes of a traced call.

    Attributes:
        own: in order.
        inputs: of the graph, that these read.
        result: of the call, as Dynamo's variable.
    """

    own: Sequence[Node]
    inputs: Sequence[Node]
    result: Any

    @classmethod
    def collect(cls, own: Sequence[Node], result: Any, signature: CallSignature) -> LayerNodes:
        """Return the nodes of a call.

        Raises:
            ReuseRejected: one cannot be copied.
        """
        inside = set(own)
        for node in own:
            _check_node(node, inside)
        outside = dict.fromkeys(read for node in own for read in node.all_input_nodes if read not in inside)
        inputs = [node for node in outside if node not in signature.nodes]
        for node in inputs:
            if node.op != "placeholder" or node.meta[GRAPH_ARG].source is None:
                raise ReuseRejected(f"it reads {node}, which is not an argument")
            fake_layout(node.meta[EXAMPLE_VALUE])
        _check_result(result, inside.union(signature.nodes))
        return cls(own, inputs, result)


def _check_node(node: Node, inside: set[Node]) -> None:
    if node.op not in ("call_function", "call_method"):
        raise ReuseRejected(f"{node} is a {node.op}")
    if not all(written in inside for written in mutated_inputs(node)):
        raise ReuseRejected(f"{node} mutates an argument")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in CHANGE_METADATA:
        raise ReuseRejected(f"{node} changes metadata of a tensor")
    for value in _leaves(node.meta.get(EXAMPLE_VALUE)):
        if isinstance(value, Tensor):
            fake_layout(value)
            if getattr(value, "constant", None) is not None:
                raise ReuseRejected("a tensor with a known value")
        elif isinstance(value, SYMBOLIC) and size_key(value) is None:
            raise ReuseRejected("a number that does not follow from sizes")


def _check_result(result: Any, known: set[Node]) -> None:
    if type(result) is TupleVariable:
        for item in result.items:
            _check_result(item.realize(), known)
    elif type(result) is TensorVariable:
        if result.as_proxy().node not in known:
            raise ReuseRejected("it returns a tensor that is not its own")
    elif not isinstance(result, ConstantVariable):
        raise ReuseRejected(f"it returns a {type(result).__name__}")


def _leaves(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def copy_layer(
    tx: Any, nodes: LayerNodes, matched: MatchedGuards, paired: Mapping[Node, Any], modules: tuple[Any, Any]
) -> Any:
    """Add the nodes to the graph again for another module, and return the result as Dynamo's variable.

    Args:
        paired: tensor arguments of the other call, as Dynamo's variables, by the nodes of the traced call.

    Raises:
        ReuseRejected: an input of the graph differs from the traced module's.
    """
    _record_floats(tx, matched)
    paths = _ModulePaths(*modules)
    new: dict[Node, Node] = {node: variable.as_proxy().node for node, variable in paired.items()}
    new |= _add_inputs(tx, nodes.inputs, matched, paths)
    storages = _Storages(new)
    tracer = tx.output.current_tracer
    wanted = {node for node in _result_nodes(nodes.result) if node not in new}
    with no_dispatch_modes(), no_python_dispatcher():
        for node in nodes.own:
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = copy = tracer.create_node(node.op, node.target, args, kwargs, _base_name(node.name), node.type)
            own = {name: note for name, note in copy.meta.items() if name != CUSTOM}
            copy.meta = paths.rename(node.meta | own)
            if SOURCE_FN_STACK in node.meta:
                *callers, (_, function) = node.meta[SOURCE_FN_STACK]
                copy.meta[SOURCE_FN_STACK] = [*callers, (copy.name, function)]
            if EXAMPLE_VALUE in node.meta:
                copy.meta[EXAMPLE_VALUE] = storages.copy(node.meta[EXAMPLE_VALUE])
    variables = dict(paired)
    for node in wanted:
        variables[node] = _variable(tx, Proxy(new[node], tracer), node.meta[EXAMPLE_VALUE])
    return _copy_result(nodes.result, variables)


def _base_name(name: str) -> str:
    """Return the name without its number, from which torch would try one number after the other."""
    base, _, number = name.rpartition("_")
    return base if base and number.isdecimal() else name


def _variable(tx: Any, proxy: Proxy, like: Tensor) -> Any:
    value = proxy.node.meta.pop(EXAMPLE_VALUE)
    if value.requires_grad and not like.is_leaf:
        with value.fake_mode, torch.enable_grad():
            # Not a leaf, and not a view of one, which code must not write to.
            value = unsafe_view(value, value.shape)
    return wrap_proxy(tx, proxy, value)


def _result_nodes(result: Any) -> list[Node]:
    if type(result) is TupleVariable:
        return [node for item in result.items for node in _result_nodes(item.realize())]
    return [result.as_proxy().node] if type(result) is TensorVariable else []


def _copy_result(result: Any, variables: Mapping[Node, Any]) -> Any:
    if type(result) is TupleVariable:
        return TupleVariable([_copy_result(item.realize(), variables) for item in result.items])
    if type(result) is TensorVariable:
        return variables[result.as_proxy().node]
    return ConstantVariable.create(result.as_python_constant())


class _Storages:
    """Makes fake tensors for copies, which share memory with each other as the originals do."""

    def __init__(self, new: Mapping[Node, Node]) -> None:
        # By the original storage: the new ones, each with the difference of offsets in bytes.
        self._storages: dict[int, set[tuple[Any, int]]] = defaultdict(set)
        for old, other in new.items():
            one, two = old.meta[EXAMPLE_VALUE], other.meta[EXAMPLE_VALUE]
            if isinstance(one, SymInt):
                continue
            self._storages[storage_key(one)].add((two.untyped_storage(), _offset_bytes(two) - _offset_bytes(one)))

    def copy(self, value: Any) -> Any:
        """Return a value for the copy of a node.

        Raises:
            ReuseRejected: it is a view of memory that has several copies.
        """
        if isinstance(value, tuple | list):
            return type(value)(self.copy(item) for item in value)
        if not isinstance(value, FakeTensor):
            return value
        storages = self._storages[storage_key(value)]
        if not storages:
            size = value.untyped_storage().nbytes()
            storages.add((torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage(), 0))
        if len(storages) > 1:
            raise ReuseRejected("views of memory that inputs share")
        [(storage, offset)] = storages
        made = torch.empty(0, dtype=value.dtype, device="meta")
        made.set_(storage, (_offset_bytes(value) + offset) // value.itemsize, value.shape, value.stride())
        return fake_like(value, made).requires_grad_(value.requires_grad)


def _offset_bytes(value: Tensor) -> int:
    return int(value.storage_offset()) * value.itemsize


class _ModulePaths:
    """Renames module stacks of nodes from a traced module to another one."""

    def __init__(self, old: Any, new: Any) -> None:
        self._old, self._new = path_in_modules(old), path_in_modules(new)
        self._ids = _pair_ids(old.value, new.value)

    def rename(self, meta: dict[str, Any]) -> dict[str, Any]:
        stack = meta.get(NN_MODULE_STACK)
        if stack:
            meta[NN_MODULE_STACK] = {self._key(key): (self._path(path), kind) for key, (path, kind) in stack.items()}
        return meta

    def _key(self, key: str) -> str:
        number, at, calls = key.partition("@")
        return self._ids.get(number, number) + at + calls

    def _path(self, path: str) -> str:
        inside = path == self._old or path.startswith(self._old + ".")
        return self._new + path.removeprefix(self._old) if inside else path


def _pair_ids(old: nn.Module, new: nn.Module) -> dict[str, str]:
    parts = zip(old.modules(), new.modules(), strict=True)
    return {str(id(one)): str(id(other)) for one, other in parts}


def _record_floats(tx: Any, matched: MatchedGuards) -> None:
    """Record the values of floats, which Dynamo makes symbols after they have changed.

    Without the record each layer's change would cost a compilation of its own.
    """
    for source in matched.floats:
        path = matched.sources.map(source)
        if has_changed_before(tx, path, matched.sources.value(path)):
            raise ReuseRejected(f"{path.name} has changed before")


def _add_inputs(tx: Any, inputs: Sequence[Node], matched: MatchedGuards, paths: _ModulePaths) -> dict[Node, Node]:
    """Make inputs of the graph for another module, and install its guards.

    Returns:
        Its inputs by those of the traced module.

    Raises:
        ReuseRejected: an input differs from the traced one.
    """
    sources, new = matched.sources, {}
    for node in inputs:
        path = sources.map(node.meta[GRAPH_ARG].source)
        if isinstance(node.meta[EXAMPLE_VALUE], SymInt):
            if path != node.meta[GRAPH_ARG].source:
                raise ReuseRejected(f"{path.name} is a symbol of its own")
            new[node] = node
            continue
        value, is_new = sources.value(path), path not in tx.output.input_source_to_var
        # Returns the known variable for an input that exists already.
        found = VariableBuilder(tx, path)(value).as_proxy().node
        if is_new and found.meta[GRAPH_ARG].source == path:
            notes = {key: node.meta[key] for key in (NN_MODULE_STACK, STACK_TRACE) if key in node.meta}
            found.meta |= paths.rename(notes)
        new[node] = found
        if _sizes(found) != _sizes(node):
            raise ReuseRejected(f"{path.name} has another layout")  # its sizes have changed before, and are symbols
    _install_guards(tx, matched, {sources.map(node.meta[GRAPH_ARG].source) for node in inputs})
    return new


def _sizes(node: Node) -> tuple[Any, ...]:
    value = node.meta[EXAMPLE_VALUE]
    fake_layout(value)
    return *layout_key(value), value.requires_grad


def _install_guards(tx: Any, matched: MatchedGuards, inputs: Set[Source]) -> None:
    """Install the guards, except those of ``inputs``, which have theirs."""
    sources = matched.sources
    for guard in matched.guards:
        path, how = sources.map(guard.originating_source), guard.create_fn
        if guard_name(guard) == "TENSOR_MATCH":
            if path not in inputs:
                VariableBuilder(tx, path)(sources.value(path))  # an unused input: the builder adds its guard
            continue
        if isinstance(how, partial) and "source_b" in how.keywords:
            how = partial(how.func, source_b=sources.map(how.keywords["source_b"]))
        own = Guard(path, how)
        own.user_stack = guard.user_stack
        tx.output.guards.add(own, collect_debug_stack=False)
