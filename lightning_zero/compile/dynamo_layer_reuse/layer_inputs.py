"""What a stamped module reads from outside: its weights become inputs of the graph, and what it is guarded by."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Any, cast

from torch.fx import Node
from torch.utils.weak import TensorWeakRef

from lightning_zero.compat.dynamo import Guard, Source, VariableBuilder, guard_name
from lightning_zero.compat.graph_inputs import has_changed_before, input_like
from lightning_zero.compat.graphs import EXAMPLE_VALUE, NN_MODULE_STACK, GRAPH_ARG, STACK_TRACE
from lightning_zero.compile.dynamo_layer_reuse.call_signature import form_of
from lightning_zero.compile.dynamo_layer_reuse.node_names import Names
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import Passed

__all__ = ["look_at_numbers", "taken_in"]


def look_at_numbers(tx: Any, passed: Passed) -> None:
    """Dynamo notes what a number of a module was, and makes it a symbol once it has changed: in all layers at once, or
    each time another layer's would be noticed, one compilation after the other."""
    for number in passed.numbers:
        path = passed.moved.to(number)
        if has_changed_before(tx, path, passed.moved.value(path)):
            raise Unlike(f"{path.name} has changed before")


def taken_in(tx: Any, inputs: Sequence[Node], passed: Passed, names: Names) -> dict[Node, Node]:
    """Puts inputs of a graph that a module has read into it for another one, and all guards of that.

    Returns:
        For each the other one's.

    Raises:
        Unlike: an input would not be what it is for the module that was traced.
    """
    moved, new = passed.moved, {}
    guards = {guard.originating_source: guard for guard in passed.guards if _is_usual(guard)}
    for node in inputs:
        old = node.meta[GRAPH_ARG].source
        path = moved.to(old)
        value, is_new = moved.value(path), path not in tx.output.input_source_to_var
        found = input_like(tx, path, value, node) if path is not old and old in guards else None
        if found is not None:
            # At once: whoever reads it from now on makes none.
            _add(tx, guards[old], path, partial(cast(Any, guards[old].create_fn).func, value=TensorWeakRef(value)))
        else:  # of an input that is there already Dynamo returns what stands for it
            found = VariableBuilder(tx, path)(value).as_proxy().node
        if is_new and found.meta[GRAPH_ARG].source == path:
            found.meta |= names.renamed({key: node.meta[key] for key in (NN_MODULE_STACK, STACK_TRACE) if key in node.meta})
        new[node] = found
        if _sizes(found) != _sizes(node):
            raise Unlike(f"{path.name} has another form")  # its sizes have changed before, and are symbols now
    _install(tx, passed, {moved.to(node.meta[GRAPH_ARG].source) for node in inputs})
    return new


def _sizes(node: Node) -> tuple[Any, ...]:
    value = node.meta[EXAMPLE_VALUE]
    form_of(value)
    return value.shape, value.stride(), value.dtype, value.requires_grad


def _install(tx: Any, passed: Passed, inputs: Set[Source]) -> None:
    """``inputs``: tensors that are guarded."""
    moved = passed.moved
    for guard in passed.guards:
        path, how = moved.to(guard.originating_source), guard.create_fn
        if guard_name(guard) == "TENSOR_MATCH":
            if path not in inputs:
                VariableBuilder(tx, path)(moved.value(path))  # an input that nobody reads: it makes its own guard
            continue
        if isinstance(how, partial) and "source_b" in how.keywords:
            how = partial(how.func, source_b=moved.to(how.keywords["source_b"]))
        _add(tx, guard, path, how)


def _add(tx: Any, guard: Guard, path: Source, how: Any) -> None:
    own = Guard(path, how)
    own.user_stack = guard.user_stack
    tx.output.guards.add(own, collect_debug_stack=False)


def _is_usual(guard: Guard) -> bool:
    """Whether it compares a tensor with the one that was there, and does nothing else."""
    how: Any = guard.create_fn
    given = how.keywords if isinstance(how, partial) else {}
    return guard_name(guard) == "TENSOR_MATCH" and list(given) == ["value"] and type(given["value"]) is TensorWeakRef
