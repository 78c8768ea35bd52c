"""Int attributes of modules that change from call to call, which torch compiles anew for each value."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_zero.compat.dynamo import value_at
from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch, swap_attribute

# A function's trace by Dynamo, which finds values by their paths. (torch 2.11+)
InstructionTranslator = private("torch._dynamo.symbolic_convert.InstructionTranslator")
builder = module("torch._dynamo.variables.builder")
# Functions that paths of values call. (torch 2.11+)
_get_closure_vars = private("torch._dynamo.guards._get_closure_vars")

__all__ = ["ChangingInts"]

_INTS = Patch(
    "an int attribute of a module that changes in each step costs one recompilation",
    {
        # Decides whether an int is a constant. (torch 2.11+)
        "torch._dynamo.variables.builder.is_int_specialization_case": "value, source",
    },
)


class ChangingInts:
    """Make an int attribute of a module an input of its graph once it has changed.

    Dynamo takes ints of modules for constants, and compiles code again for each value of a counter, up to its limit.
    Its setting ``allow_unspec_int_on_nn_module`` is about all modules that share code: layer numbers and sizes would
    become symbols, too. Here an attribute counts as changed if the same module had another value at an earlier
    compilation.
    """

    def __init__(self) -> None:
        self._values: MutableMapping[nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._changed: MutableMapping[nn.Module, set[str]] = WeakKeyDictionary()

    @_INTS
    @contextmanager
    def mark_as_inputs(self) -> Iterator[None]:
        """Inside, Dynamo compiles so."""
        plain = builder.is_int_specialization_case

        def is_constant(value: Any, source: Any) -> bool:
            return plain(value, source) and not self._has_changed(value, source)

        with swap_attribute(builder, "is_int_specialization_case", is_constant):
            yield

    def _has_changed(self, value: Any, source: Any) -> bool:
        if type(value) is not int or not source.guard_source.is_unspecialized_nn_module():
            return False
        owner, name = _owner(source)
        if not isinstance(owner, nn.Module) or name.startswith("_zero_"):
            return False
        before = self._values.setdefault(owner, {}).setdefault(name, value)
        if before != value:
            self._changed.setdefault(owner, set()).add(name)
        return name in self._changed.get(owner, ())


def _owner(source: Any) -> tuple[Any, str]:
    """Return the object that ``source`` reads an attribute of, and the attribute's name; None for other sources."""
    base: Any = getattr(source, "base", None)
    name = getattr(source, "member", None)
    if name is None and getattr(base, "member", None) == "__dict__":
        base, name = base.base, getattr(source, "index", None)
    if base is None or not isinstance(name, str):
        return None, ""
    try:
        root = InstructionTranslator.current_tx().output.root_tx
        return value_at(base, {**_get_closure_vars(), "L": root.f_locals, "G": root.f_globals}, {}), name
    except (AttributeError, KeyError, IndexError, NameError, NotImplementedError):
        return None, ""
