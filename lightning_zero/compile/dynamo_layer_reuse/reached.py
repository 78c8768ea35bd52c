"""Whether code of a module gets hold of something in a way that would be another one's: by an owner that it knows, a
list of all layers, a global. Dynamo has one name for each value, however it was reached, and what is named as a part of
the module that is traced is taken for a part of each.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_zero.compat.dynamo import (
    CALLED_AT_ONCE,
    LAYERS_ONCE,
    Source,
    VariableBuilder,
    guard_of_two_paths,
    known_by,
)
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compile.dynamo_layer_reuse.sources import begins_at

__all__ = ["reached_elsewhere"]

# What is the same by whatever name: a layer's class, what it calls.
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


@LAYERS_ONCE
@contextmanager
def reached_elsewhere(module: Source) -> Iterator[list[str]]:
    """What the code that is traced inside gets hold of so.

    Args:
        module: the path of the module whose code it is.
    """
    found: list[str] = []

    def build(builder: Any, value: Any) -> Any:
        name: Any = getattr(known_by(builder, value), "source", None)
        path = builder.source
        elsewhere = name is not None and name != path and not isinstance(value, _CODE)
        if elsewhere and _goes_astray(name, path, module, isinstance(value, Tensor | nn.Module)):
            found.append(f"{path.name} is {name.name}")
        return plain(builder, value)

    def at_once(call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            found.append("a function's result is taken for constant")
            return call(*args, **kwargs)

        return called

    plain = VariableBuilder.__call__
    with ExitStack() as stack:
        stack.enter_context(swap_attribute(VariableBuilder, "__call__", build))
        for owner, name in CALLED_AT_ONCE:
            stack.enter_context(swap_attribute(owner, name, at_once(getattr(owner, name))))
        yield found


def _goes_astray(known: Source, path: Source, module: Source, may_differ: bool) -> bool:
    """Whether a value that has a name already is reached by another path, and moving the name moves it wrongly.
    ``may_differ``: from layer to layer though nothing else tells; other objects are the same for layers built alike."""
    if not begins_at(path, module):  # the module, a part or an owner of it, from elsewhere
        return begins_at(known, module) or begins_at(module, known)
    if begins_at(known, module):
        return False  # one of its parts twice, which is guarded
    # An owner of it; or what is not guarded to be the same, as it is read by a name that is not moved.
    return begins_at(module, known) or (may_differ and guard_of_two_paths(path, known) is None)
