"""Guards of a traced layer, and the check that another layer meets them."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, cast

from torch import Tensor, nn

from lightning_zero.compat.dynamo import ChainedSource, Guard, Source, guard_name, value_at
from lightning_zero.compat.modules import STATE_DICT_HOOKS
from lightning_zero.compile.capture.module_hooks import module_hooks
from lightning_zero.compile.dynamo_layer_reuse.trace_inputs import PLAIN, ReuseRejected, comparable, tensor_layout

# Attributes that are compared separately, or that no call reads.
SEPARATE = {"_parameters", "_buffers", "_modules", *STATE_DICT_HOOKS}
CONSTANTS = {"CONSTANT_MATCH", "EQUALS_MATCH"}


def check_built_alike(old: nn.Module, new: nn.Module) -> None:
    """Check differences between modules that guards do not cover.

    Dynamo assumes that torch's own modules and hooks do not change, and adds no guard for an object that it has read by
    another path.

    Raises:
        ReuseRejected: the modules differ.
    """
    if new is old:
        return
    olds, news = list(old.named_modules(remove_duplicate=False)), list(new.named_modules(remove_duplicate=False))
    if [(name, type(part)) for name, part in olds] != [(name, type(part)) for name, part in news]:
        raise ReuseRejected("other submodules")
    for (name, one), (_, other) in zip(olds, news, strict=True):
        if any(hooks for part in (one, other) for hooks in module_hooks(part)):
            raise ReuseRejected(f"hooks of {name or 'the module'}")
        if one.training is not other.training or list(vars(one)) != list(vars(other)):
            raise ReuseRejected(f"training mode or attributes of {name or 'the module'}")
        attributes, torchs = vars(other), type(one).forward.__module__.startswith("torch.nn.")
        for attribute, value in vars(one).items():
            if attribute not in SEPARATE and not _is_alike(value, attributes[attribute], torchs):
                raise ReuseRejected(f"attribute {name}.{attribute}")
        for kind in ("_parameters", "_buffers"):
            if _layouts(getattr(one, kind)) != _layouts(getattr(other, kind)):
                raise ReuseRejected(f"tensors of {name}")


@dataclass(frozen=True)
class MatchedGuards:
    """Guards of a traced module that another one meets.

    Attributes:
        sources: maps sources of the traced module to the other one.
        guards: of the traced module, to be installed for the other one.
        floats: sources of floats that the traced module has read.
    """

    sources: SourceMap
    guards: Sequence[Guard]
    floats: Sequence[Source]


class TraceGuards:
    """Guards of a traced module.

    Raises:
        ReuseRejected: a guard is of an unknown kind.
    """

    def __init__(self, tx: Any, module: Any) -> None:
        self._path = module.source
        here = SourceMap(tx, self._path, self._path)
        own = [guard for guard in tx.output.guards if begins_at(guard.originating_source, self._path)]
        conditions = [(guard, _condition(guard)) for guard in own]
        self._conditions = [(guard, ask, ask(here, guard.originating_source)) for guard, ask in conditions]
        constants = [guard.originating_source for guard in own if guard_name(guard) in CONSTANTS]
        self._floats = [path for path in dict.fromkeys(constants) if type(here.value(path)) is float]

    def match(self, tx: Any, module: Any) -> MatchedGuards:
        """Return the guards for another module.

        Raises:
            ReuseRejected: it does not meet one.
        """
        sources = SourceMap(tx, self._path, module.source)
        for guard, ask, answer in self._conditions if module.source != self._path else ():
            there = sources.map(guard.originating_source)
            if ask(sources, there) != answer:
                raise ReuseRejected(f"{guard_name(guard)} at {there.name}")
        return MatchedGuards(sources, [guard for guard, _, _ in self._conditions], self._floats)


# The property of a value that a guard checks, by the guard's name. Other guards are unknown.
_PROPERTIES: dict[str, Callable[..., Any]] = {
    "TYPE_MATCH": type,
    "CONSTANT_MATCH": lambda value, /: comparable(value),
    "EQUALS_MATCH": lambda value, /, recompile_hint=None: comparable(value),
    "BOOL_MATCH": id,
    "NONE_MATCH": id,
    "ID_MATCH": lambda value, /, recompile_hint=None: id(value),
    "FUNCTION_MATCH": id,
    "CLASS_MATCH": id,
    "MODULE_MATCH": id,
    "BUILTIN_MATCH": id,
    "CLOSURE_MATCH": lambda value: id(value.__code__ if type(value) is types.FunctionType else value),
    "SEQUENCE_LENGTH": lambda value: (type(value), len(value)),
    "DICT_KEYS_MATCH": lambda value: (type(value), [comparable(key) for key in value]),
    "DICT_CONTAINS": lambda value, /, key, invert=False: key in value,
    "DICT_NOT_CONTAINS": lambda value, /, key: key in value,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, /, attr: attr in vars(value),
    "EMPTY_NN_MODULE_HOOKS_DICT": len,
    "TENSOR_MATCH": lambda value, /, **_: tensor_layout(value),
}


def _condition(guard: Guard) -> Callable[[SourceMap, Any], Any]:
    """Return a function of a path that returns the property that the guard checks."""
    name = guard_name(guard)
    options = guard.create_fn.keywords if isinstance(guard.create_fn, partial) else {}
    if isinstance(guard.create_fn, partial) and guard.create_fn.args:
        raise ReuseRejected(f"unknown guard {name} with {guard.create_fn.args}")
    if name == "HASATTR":  # torch 2.11 has the attribute at the end of the path, which may not exist
        if "attr" in options:
            return lambda sources, path: hasattr(sources.value(path), options["attr"])
        return lambda sources, path: hasattr(sources.value(path.base), path.member)
    if name == "DUPLICATE_INPUT":
        return lambda sources, path: sources.value(path) is sources.value(sources.map(options["source_b"]))
    if name not in _PROPERTIES:
        raise ReuseRejected(f"unknown guard {name}")
    return lambda sources, path: _PROPERTIES[name](sources.value(path), **options)


def _layouts(tensors: dict[str, Tensor | None]) -> list[Any]:
    return [(name, None if tensor is None else tensor_layout(tensor)) for name, tensor in tensors.items()]


def _is_alike(one: Any, other: Any, must_be_equal: bool) -> bool:
    """Return True for equal values, and for plain ones unless they must be equal.

    Plain values have guards, also in dicts.
    """
    if one is other:
        return True
    if not must_be_equal and isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return True
    if type(one) is dict and type(other) is dict and list(one) == list(other):  # PEFT keeps the layer's name in one
        return all(_is_alike(one[key], other[key], must_be_equal) for key in one)
    return bool(comparable(one) == comparable(other))


def begins_at(path: Source, module: Source) -> bool:
    """Return True if a path continues the path of a module, or is equal to it."""
    while path != module:
        if not isinstance(path, ChainedSource):
            return False
        path = path.base
    return True


class SourceMap:
    """Maps paths that begin at one module to another module.

    Args:
        tx: Dynamo's translator, which has the frame's locals and globals.
    """

    def __init__(self, tx: Any, old: Source, new: Source) -> None:
        self._old, self._new = old, new
        root = tx.output.root_tx
        self._names = {"G": root.f_globals, "L": root.f_locals}
        self._paths: dict[Source, Source] = {}
        self._values: dict[Source, Any] = {}

    def map(self, path: Source) -> Source:
        """Return the path in the new module, or the path itself if it does not begin at the old one."""
        found = self._paths.get(path)
        if found is None:
            found = self._paths[path] = self._new if path == self._old else self._map_parts(path)
        return found

    def _map_parts(self, path: Source) -> Source:
        if not isinstance(path, ChainedSource):
            return path
        changed = {}
        for name in _field_names(cast(Any, type(path))):
            part = getattr(path, name)
            if isinstance(part, Source) and (mapped := self.map(part)) is not part:
                changed[name] = mapped
        return replace(path, **changed) if changed else path

    def value(self, path: Source) -> Any:
        """Return the value at a path.

        Raises:
            ReuseRejected: there is none.
        """
        try:
            return value_at(path, self._names, self._values)
        except Exception as error:  # paths are code, which may raise any error
            raise ReuseRejected(f"no value at {path.name}") from error


@lru_cache(256)
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind))
