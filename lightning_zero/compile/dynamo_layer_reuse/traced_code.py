"""Checks of traced code for results that would differ in another layer although no guard shows it.

Dynamo compares objects by identity while it traces (``self is self.owner.last``, ``layers.index(self)``), and guards
only the compared values. It has one name for each value, however code reached it: a value that is named as a part of
the traced layer would be replaced by the part of another layer.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    LAYER_REUSE,
    ListVariable,
    ModuleVariable,
    ObjectVariable,
    Source,
    TupleVariable,
    comparisons,
    guard_of_two_paths,
    is_constant,
    known_variable,
    translators,
)
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import begins_at

OPERATORS = {operator.is_, operator.is_not, operator.eq, operator.ne, operator.contains, id, hash}
METHODS = {"index", "count", "remove", "__contains__", "__eq__", "__ne__"}
OBJECTS = (ModuleVariable, ObjectVariable, TensorVariable, ListVariable, TupleVariable)
# Types of values that may differ between layers that are built alike.
MAY_DIFFER = (Tensor, nn.Module, dict)
# Types of values that are equal in all layers under any name.
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


@LAYER_REUSE
@contextmanager
def watch_identity_checks() -> Iterator[list[str]]:
    """Collect the comparisons by identity in code that is traced inside. Most layers have none."""
    found: list[str] = []

    def check(what: str, operands: Sequence[Any]) -> None:
        objects = [_is_object(operand) for operand in operands]
        if any(objects) and (len(operands) == 1 or all(map(_may_be_object, operands))):
            found.append(what)

    def check_call(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
            if getattr(variable, "fn", None) in OPERATORS:
                check(variable.fn.__name__, args)
            return plain(variable, tx, args, kwargs)

        return call_function

    def check_key(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make_key(hashable: Any, variable: Any, *rest: Any) -> Any:
            check("a key", [variable])
            return plain(hashable, variable, *rest)

        return make_key

    makers: dict[str, Callable[[Any], Any]] = {
        "BuiltinVariable.call_function": check_call,
        ".__init__": check_key,
        ".call_method": partial(_check_method, check),
        ".dispatch_table": partial(_check_table, check),
    }
    with ExitStack() as stack:
        stack.enter_context(LAYER_REUSE.replace(makers))
        for kind in translators():  # each has a table of its own
            stack.enter_context(swap_attribute(kind, "dispatch_table", _check_table(check, kind.dispatch_table)))
        yield found


def _check_table(check: Callable[[str, Sequence[Any]], None], table: Sequence[Any]) -> list[Any]:
    changed = list(table)
    for opcode, name in comparisons().items():
        changed[opcode] = _check_comparison(table[opcode], name, check)
    return changed


def _check_comparison(plain: Any, name: str, check: Callable[[str, Sequence[Any]], None]) -> Any:
    def compare(tx: Any, instruction: Any) -> Any:
        operands = tx.stack[-2:]
        if name != "COMPARE_OP" or not any(isinstance(_realized(one), TensorVariable) for one in operands):
            check(name, operands)  # tensors are compared by value
        return plain(tx, instruction)

    return compare


def _check_method(check: Callable[[str, Sequence[Any]], None], plain: Any) -> Any:
    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if name in METHODS:
            check(name, args)
        return plain(variable, tx, name, args, kwargs)

    return call_method


def _is_object(variable: Any) -> bool:
    """Return True for an object that is equal to itself only, or contains one."""
    return isinstance(_realized(variable), OBJECTS) and _may_be_object(variable)


def _may_be_object(variable: Any) -> bool:
    return not is_constant(_realized(variable))


def _realized(variable: Any) -> Any:
    """Return the variable behind a realized lazy one. Realizing others would add guards."""
    return variable.realize() if variable.is_realized() else variable


@LAYER_REUSE
@contextmanager
def watch_foreign_values(module: Source) -> Iterator[list[str]]:
    """Collect values that traced code reaches in a way in which another layer would reach others."""
    found: list[str] = []

    def watch_build(plain: Callable[..., Any]) -> Callable[..., Any]:
        def build(builder: Any, value: Any) -> Any:
            name: Any = getattr(known_variable(builder, value), "source", None)
            path = builder.source
            renamed = name is not None and name != path and not isinstance(value, _CODE)
            if renamed and _maps_wrongly(name, path, module, isinstance(value, MAY_DIFFER)):
                found.append(f"{path.name} is {name.name}")
            return plain(builder, value)

        return build

    def watch_call(call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            found.append("a function with a constant result")
            return call(*args, **kwargs)

        return called

    with LAYER_REUSE.replace({"VariableBuilder.__call__": watch_build, "invoke_and_store_as_constant": watch_call}):
        yield found


def _maps_wrongly(known: Source, path: Source, module: Source, may_differ: bool) -> bool:
    """Return True if a value known by one path is reached by another, and the two map to different values.

    Args:
        may_differ: the value may differ between layers without a guard; others are equal in layers built alike.
    """
    if not begins_at(path, module):  # the module, its part or its owner, reached from elsewhere
        return begins_at(known, module) or begins_at(module, known)
    if begins_at(known, module):
        return False  # a part under two names, which has a guard
    # An owner of the module, or a value without a guard that both paths have the same one.
    return begins_at(module, known) or (may_differ and guard_of_two_paths(path, known) is None)
