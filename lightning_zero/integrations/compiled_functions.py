"""Functions that the user compiled by hand, and that read a model's weights, run as they were written.

``self.encode = torch.compile(lambda x: self.net(x), fullgraph=True)`` would trace what the strategy does where modules
are called and weights are read, by a backend that knows nothing of shards. The modules such functions call are compiled
by the strategy. What reads no weights (``torch.compile(flex_attention)``) stays compiled: it may be why a model fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_zero.compat.compiler import OptimizedModule, compiled_from

__all__ = ["uncompile_functions"]


def uncompile_functions(root: nn.Module) -> list[str]:
    """Puts in the place of each such attribute of ``root``'s modules, or of their lists and dicts, what it was compiled
    from; returns their names."""
    inside = {id(module) for module in root.modules()}
    found = []
    for name, module in root.named_modules():
        before = f"{name}." if name else ""
        for key, value in list(vars(module).items()):
            plain = _uncompiled(value, inside)
            if plain is not value:
                vars(module)[key] = plain
                found.append(before + key)
        for key, function in _compiled_methods(type(module)):
            if key not in vars(module):
                vars(module)[key] = MethodType(function, module)
                found.append(before + key)
    return found


def _uncompiled(value: Any, inside: set[int]) -> Any:
    """``value`` itself where nothing is to be done."""
    if isinstance(value, OptimizedModule):
        return value._orig_mod if id(value._orig_mod) in inside else value
    if isinstance(value, FunctionType):
        original = compiled_from(value)
        return original if original is not None and _references_any(original, inside, set()) else value
    if type(value) in (list, tuple):
        parts = [_uncompiled(part, inside) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(parts)
    if type(value) is dict and value:
        parts = _uncompiled(list(value.values()), inside)
        changed = any(part is not old for part, old in zip(parts, value.values(), strict=True))
        return dict(zip(value, parts, strict=True)) if changed else value
    return value


def _compiled_methods(cls: type) -> Iterable[tuple[str, Callable[..., Any]]]:
    """Methods that were compiled where their class was written."""
    seen = set()
    for base in cls.__mro__:
        for key, value in vars(base).items():
            original = compiled_from(value) if isinstance(value, FunctionType) and key not in seen else None
            if original is not None:
                yield key, original
            seen.add(key)


def _references_any(value: Any, inside: set[int], seen: set[int]) -> bool:
    """Whether a function holds one of these modules: as a method of it, or in what surrounds it."""
    if id(value) in inside:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: list[Any] = []
    if isinstance(value, MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        cells = [_cell_contents(cell) for cell in value.__closure__ or ()]
        held = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, OptimizedModule):
        held = [value._orig_mod]
    return any(_references_any(part, inside, seen) for part in held)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
