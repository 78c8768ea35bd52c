"""What a stamped module reads from outside: its weights become inputs of the graph, and what it is guarded by."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils.weak import TensorWeakRef

from lightning_zero.compat.dynamo import Guard, Source, VariableBuilder, guard_name
from lightning_zero.compat.graphs import EXAMPLE, MODULES, ORIGIN, STACK
from lightning_zero.compat.incoming import has_changed_before, input_like
from lightning_zero.compile.traced_once.given import form_of
from lightning_zero.compile.traced_once.known import Passed
from lightning_zero.compile.traced_once.names import Names
from lightning_zero.compile.traced_once.unlike import Unlike

__all__ = ["look_at_numbers", "taken_in"]

# Guards that are made where a tensor becomes an input.
OF_INPUTS = ("TENSOR_MATCH", "TYPE_MATCH")


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
    guards = _of_tensors(passed.guards)
    done: set[tuple[str, Source]] = set()
    for node in inputs:
        old = node.meta[ORIGIN].source
        path = moved.to(old)
        value, is_new = moved.value(path), path not in tx.output.input_source_to_var
        found = input_like(tx, path, value, node) if path is not old and old in guards else None
        if found is not None:
            for guard in guards[old]:  # at once: whoever reads it from now on makes none
                _add(tx, guard, path, _of_tensor(guard, value))
                done.add((guard_name(guard), path))
        else:  # of an input that is there already Dynamo returns what stands for it
            found = VariableBuilder(tx, path)(value).as_proxy().node
            done.add(("TENSOR_MATCH", path))
        if is_new and found.meta[ORIGIN].source == path:
            found.meta |= names.renamed({key: node.meta[key] for key in (MODULES, STACK) if key in node.meta})
        new[node] = found
        if _sizes(found) != _sizes(node):
            raise Unlike(f"{path.name} has another form")  # its sizes have changed before, and are symbols now
    _install(tx, passed, done)
    return new


def _sizes(node: Node) -> tuple[Any, ...]:
    value = node.meta[EXAMPLE]
    form_of(value)
    return value.shape, value.stride(), value.dtype, value.requires_grad


def _install(tx: Any, passed: Passed, done: Set[tuple[str, Source]]) -> None:
    """All but those that there are already, by their names and paths."""
    moved = passed.moved
    for guard in passed.guards:
        name, path = guard_name(guard), moved.to(guard.originating_source)
        if (name, path) in done:
            continue
        if name == "TENSOR_MATCH":
            VariableBuilder(tx, path)(moved.value(path))  # an input that nobody reads: it makes its own guard
            continue
        how: Any = guard.create_fn
        if isinstance(how, partial) and "source_b" in how.keywords:
            how = partial(how.func, source_b=moved.to(how.keywords["source_b"]))
        _add(tx, guard, path, how)


def _add(tx: Any, guard: Guard, path: Source, how: Any) -> None:
    own = Guard(path, how)
    own.user_stack = guard.user_stack
    tx.output.guards.add(own, collect_debug_stack=False)


def _of_tensors(guards: Sequence[Guard]) -> dict[Source, list[Guard]]:
    """For each path to a tensor, that is compared in the usual way, its guards."""
    usual = {guard.originating_source for guard in guards if _is_usual(guard)}
    found: dict[Source, list[Guard]] = {}
    for guard in guards:
        if guard.originating_source in usual and guard_name(guard) in OF_INPUTS:
            found.setdefault(guard.originating_source, []).append(guard)
    return found


def _is_usual(guard: Guard) -> bool:
    how: Any = guard.create_fn
    given = how.keywords if isinstance(how, partial) else {}
    return guard_name(guard) == "TENSOR_MATCH" and list(given) == ["value"] and type(given["value"]) is TensorWeakRef


def _of_tensor(guard: Guard, value: Tensor) -> Any:
    how: Any = guard.create_fn
    return partial(how.func, value=TensorWeakRef(value)) if _is_usual(guard) else how
