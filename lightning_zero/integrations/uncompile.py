"""Undo the user's own ``torch.compile`` in a model, since the strategy compiles the modules itself.

A user's compiled module or function would trace the strategy's gathers with a backend that does not know shards, and
would keep unsharded weights. Functions that read no weights (``torch.compile(flex_attention)``) stay compiled: a model
may fit only with them. Names in state dicts stay those of the compiled module (``net._orig_mod.weight``), so that files
fit the user's own module; files with and without that part are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from lightning_zero.compat.compiler import OptimizedModule, compiled_from

_NAME = "_orig_mod."


class UncompiledModule(NamedTuple):
    """A module that the user had compiled.

    Attributes:
        sites: Parents that held the compiled module, and its name in each.
        everywhere: True if no parent also holds the original, as in ``self.fast = torch.compile(self.net)``.
    """

    module: nn.Module
    sites: list[tuple[nn.Module, str]]
    everywhere: bool


def uncompile_modules(module: nn.Module) -> list[UncompiledModule]:
    """Replace compiled modules and functions by their originals; return the modules, inner ones first."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    plain = set()
    for child in module.modules():
        child._compiled_call_impl = None
        for name, grandchild in list(child._modules.items()):
            if isinstance(grandchild, OptimizedModule):
                child._modules[name] = grandchild._orig_mod
                found.setdefault(grandchild._orig_mod, []).append((child, name))
            else:
                plain.add(grandchild)
    uncompile_functions(module)
    return [UncompiledModule(original, sites, original not in plain) for original, sites in found.items()][::-1]


# -- names in state dicts


def uncompiled_name(key: str) -> str:
    """Return the name of a value in a model without compiled modules."""
    return key.replace(_NAME, "")


def accept_compiled_names(root: nn.Module, compiled: Iterable[UncompiledModule]) -> None:
    """Read state dicts in which other modules were compiled. Call before hooks that look up weights."""
    for module in [root, *(one.module for one in compiled)]:
        module.register_load_state_dict_pre_hook(_remove_compiled_names)


def save_compiled_names(compiled: Iterable[UncompiledModule]) -> None:
    """Save these modules' values under compiled names. Call after hooks that look up weights."""
    for module, sites, everywhere in compiled:
        for owner, inner in [(module, "")] if everywhere else [(parent, f"{name}.") for parent, name in sites]:
            # A partial, because torch sets an attribute on the function.
            owner.register_state_dict_post_hook(partial(_add_compiled_names, inner))


def _remove_compiled_names(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and _NAME in key[len(prefix) :]]:
        state[prefix + uncompiled_name(key[len(prefix) :])] = state.pop(key)


def _add_compiled_names(inner: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    before = prefix + inner
    for key in [key for key in state if key.startswith(prefix)]:  # reinsert all of them to keep their order
        in_module = key.startswith(before)
        state[before + _NAME + key[len(before) :] if in_module else key] = state.pop(key)


# -- functions


def uncompile_functions(root: nn.Module) -> list[str]:
    """Replace compiled functions that reach modules of ``root`` by their originals; return their names.

    The functions are attributes of the modules, or items of lists, tuples and dicts in these, or methods.
    """
    modules = {id(module) for module in root.modules()}
    found = []
    for name, module in root.named_modules():
        before = f"{name}." if name else ""
        for key, value in list(vars(module).items()):
            original = _uncompiled(value, modules)
            if original is not value:
                vars(module)[key] = original
                found.append(before + key)
        for key, function in _compiled_methods(type(module)):
            if key not in vars(module):
                vars(module)[key] = MethodType(function, module)
                found.append(before + key)
    return found


def _uncompiled(value: Any, modules: set[int]) -> Any:
    """Return the original of a compiled value; ``value`` itself if there is nothing to replace."""
    if isinstance(value, OptimizedModule):
        return value._orig_mod if id(value._orig_mod) in modules else value
    if isinstance(value, FunctionType):
        original = compiled_from(value)
        return original if original is not None and _references_any(original, modules, set()) else value
    if type(value) in (list, tuple):
        parts = [_uncompiled(part, modules) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(parts)
    if type(value) is dict and value:
        parts = _uncompiled(list(value.values()), modules)
        changed = any(part is not old for part, old in zip(parts, value.values(), strict=True))
        return dict(zip(value, parts, strict=True)) if changed else value
    return value


def _compiled_methods(cls: type) -> Iterable[tuple[str, Callable[..., Any]]]:
    """Yield methods that are compiled in their class, and their originals."""
    seen = set()
    for base in cls.__mro__:
        for key, value in vars(base).items():
            original = compiled_from(value) if isinstance(value, FunctionType) and key not in seen else None
            if original is not None:
                yield key, original
            seen.add(key)


def _references_any(value: Any, modules: set[int], seen: set[int]) -> bool:
    """Return True if a function refers to one of ``modules`` as self, in its closure or defaults."""
    if id(value) in modules:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    references: list[Any] = []
    if isinstance(value, MethodType):
        references = [value.__self__, value.__func__]
    elif isinstance(value, partial):
        references = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        cells = [_cell_contents(cell) for cell in value.__closure__ or ()]
        references = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, OptimizedModule):
        references = [value._orig_mod]
    return any(_references_any(part, modules, seen) for part in references)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
