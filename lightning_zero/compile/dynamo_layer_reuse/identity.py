"""Whether code asks which object something is: ``self is self.owner.last``, ``layers.index(self)``, ``table[self]``.

Dynamo answers while it traces, and guards only what it compares with. Another layer is another object, with another
answer, that no guard would tell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    LAYERS_ONCE,
    BuiltinVariable,
    HashableKey,
    ListVariable,
    ModuleVariable,
    ObjectVariable,
    TupleVariable,
    comparisons,
    is_constant,
    translators,
)
from lightning_zero.compat.patches import swap_attribute

__all__ = ["asked_for_identity"]

OPERATORS = {operator.is_, operator.is_not, operator.eq, operator.ne, operator.contains, id, hash}
METHODS = {"index", "count", "remove", "__contains__", "__eq__", "__ne__"}
OBJECTS = (ModuleVariable, ObjectVariable, TensorVariable, ListVariable, TupleVariable)


@LAYERS_ONCE
@contextmanager
def asked_for_identity() -> Iterator[list[str]]:
    """What of the code that is traced inside asks so: nothing, in most layers."""
    found: list[str] = []

    def look(what: str, operands: Sequence[Any]) -> None:
        objects = [_is_object(operand) for operand in operands]
        if any(objects) and (len(operands) == 1 or all(map(_may_be_object, operands))):
            found.append(what)

    def function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if getattr(variable, "fn", None) in OPERATORS:
            look(variable.fn.__name__, args)
        return plain_function(variable, tx, args, kwargs)

    def key(hashable: Any, variable: Any, *rest: Any) -> Any:
        look("a key", [variable])
        return plain_key(hashable, variable, *rest)

    plain_function, plain_key = BuiltinVariable.call_function, HashableKey.__init__
    with ExitStack() as stack:
        for owner, name, instead in (
            (BuiltinVariable, "call_function", function),
            (HashableKey, "__init__", key),
            *((kind, "call_method", _method(kind.call_method, look)) for kind in (ListVariable, TupleVariable)),
            *((one, "dispatch_table", _table(one.dispatch_table, look)) for one in translators()),
        ):
            stack.enter_context(swap_attribute(owner, name, instead))
        yield found


def _table(table: Sequence[Any], look: Callable[[str, Sequence[Any]], None]) -> list[Any]:
    changed = list(table)
    for at, name in comparisons().items():
        changed[at] = _compare(table[at], name, look)
    return changed


def _compare(plain: Any, name: str, look: Callable[[str, Sequence[Any]], None]) -> Any:
    def compare(tx: Any, instruction: Any) -> Any:
        operands = tx.stack[-2:]
        if name != "COMPARE_OP" or not any(isinstance(_seen(one), TensorVariable) for one in operands):
            look(name, operands)  # tensors are compared by their values
        return plain(tx, instruction)

    return compare


def _method(plain: Any, look: Callable[[str, Sequence[Any]], None]) -> Any:
    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if name in METHODS:
            look(name, args)
        return plain(variable, tx, name, args, kwargs)

    return call_method


def _is_object(variable: Any) -> bool:
    """Whether it stands for an object that is equal to itself alone, or has such in it."""
    return isinstance(_seen(variable), OBJECTS) and _may_be_object(variable)


def _may_be_object(variable: Any) -> bool:
    return not is_constant(_seen(variable))


def _seen(variable: Any) -> Any:
    """Without looking at what nobody has looked at yet, which would be to guard it."""
    return variable.realize() if variable.is_realized() else variable
