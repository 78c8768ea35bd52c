"""Whether two modules pass the same guards."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.compat.dynamo import Guard, Source, dispatch_keys, guard_name
from lightning_zero.compat.modules import STATE_DICT_HOOKS
from lightning_zero.compile.dynamo_layer_reuse.implied_guards import CONSTANTS, not_implied
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike
from lightning_zero.compile.dynamo_layer_reuse.sources import Moved, begins_at
from lightning_zero.compile.capture.module_hooks import module_hooks

__all__ = ["Known", "Passed", "are_built_alike", "constant"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# What is compared by itself, and what no call of a module reads.
PARTS = {"_parameters", "_buffers", "_modules", *STATE_DICT_HOOKS}


def are_built_alike(old: nn.Module, new: nn.Module) -> None:
    """What guards do not say, or may not.

    Dynamo takes for granted that torch's own modules stay as they are and that hooks do (unless it is told to look),
    and has no guard for an object of the module that it has met elsewhere already.

    Raises:
        Unlike: they are not.
    """
    if new is old:
        return
    olds, news = list(old.named_modules(remove_duplicate=False)), list(new.named_modules(remove_duplicate=False))
    if [(name, type(part)) for name, part in olds] != [(name, type(part)) for name, part in news]:
        raise Unlike("it has other parts")
    for (name, one), (_, other) in zip(olds, news, strict=True):
        if any(hooks for part in (one, other) for hooks in module_hooks(part)):
            raise Unlike(f"{name or 'it'} has hooks")
        if one.training is not other.training or list(vars(one)) != list(vars(other)):
            raise Unlike(f"{name or 'it'} is in another state")
        attributes, torchs = vars(other), _is_torchs(one)
        for attribute, value in vars(one).items():
            if attribute not in PARTS and not _alike(value, attributes[attribute], torchs):
                raise Unlike(f"{name}.{attribute} is another object")
        for kind in ("_parameters", "_buffers"):
            if _forms(getattr(one, kind)) != _forms(getattr(other, kind)):
                raise Unlike(f"{name} has other tensors")


@dataclass(frozen=True)
class Passed:
    """What is known of a module that passes the guards of another one.

    Attributes:
        moved: paths from that one to it.
        guards: of that one, those that have to be installed for it.
        numbers: paths of that one's, to floats that it has read.
    """

    moved: Moved
    guards: Sequence[Guard]
    numbers: Sequence[Source]


class Known:
    """What is guarded of a module that was traced.

    Args:
        tx: Dynamo's translator.
        module: as Dynamo's variable.

    Raises:
        Unlike: there are guards among it that nobody knows.
    """

    def __init__(self, tx: Any, module: Any) -> None:
        self._path = module.source
        here = Moved(tx, self._path, self._path)
        own = [(guard, _asked(guard)) for guard in tx.output.guards if begins_at(guard.originating_source, self._path)]
        needed = {id(guard) for guard in not_implied(guard for guard, _ in own)}
        self._asked = [
            (guard, asked, asked(here, guard.originating_source)) for guard, asked in own if id(guard) in needed
        ]
        constants = [guard.originating_source for guard, _ in own if guard_name(guard) in CONSTANTS]
        self._numbers = [path for path in dict.fromkeys(constants) if type(here.value(path)) is float]

    def moved_to(self, tx: Any, module: Any) -> Passed:
        """
        Raises:
            Unlike: it does not pass.
        """
        moved = Moved(tx, self._path, module.source)
        for guard, asked, answer in self._asked if module.source != self._path else ():
            there = moved.to(guard.originating_source)
            if asked(moved, there) != answer:
                raise Unlike(f"{guard_name(guard)} at {there.name}")
        return Passed(moved, [guard for guard, _, _ in self._asked], self._numbers)


# What guards ask of a value, by their names. What is not in here nobody knows.
_OF_A_VALUE: dict[str, Callable[..., Any]] = {
    "TYPE_MATCH": type,
    "CONSTANT_MATCH": lambda value, /: constant(value),
    "EQUALS_MATCH": lambda value, /, recompile_hint=None: constant(value),
    "BOOL_MATCH": id,
    "NONE_MATCH": id,
    "ID_MATCH": lambda value, /, recompile_hint=None: id(value),
    "FUNCTION_MATCH": id,
    "CLASS_MATCH": id,
    "MODULE_MATCH": id,
    "BUILTIN_MATCH": id,
    "CLOSURE_MATCH": lambda value: id(value.__code__ if type(value) is types.FunctionType else value),
    "SEQUENCE_LENGTH": lambda value: (type(value), len(value)),
    "DICT_KEYS_MATCH": lambda value: (type(value), [constant(key) for key in value]),
    "DICT_CONTAINS": lambda value, /, key, invert=False: key in value,
    "DICT_NOT_CONTAINS": lambda value, /, key: key in value,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, /, attr: attr in vars(value),
    "EMPTY_NN_MODULE_HOOKS_DICT": len,
    "TENSOR_MATCH": lambda value, /, **_: _form(value),
}


def _asked(guard: Guard) -> Callable[[Moved, Any], Any]:
    """What it asks of the value at a path."""
    name = guard_name(guard)
    given = guard.create_fn.keywords if isinstance(guard.create_fn, partial) else {}
    if isinstance(guard.create_fn, partial) and guard.create_fn.args:
        raise Unlike(f"nobody knows {name} with {guard.create_fn.args}")
    if name == "HASATTR":  # torch 2.11 names the attribute by the path alone, at whose end there may be nothing
        if "attr" in given:
            return lambda moved, path: hasattr(moved.value(path), given["attr"])
        return lambda moved, path: hasattr(moved.value(path.base), path.member)
    if name == "DUPLICATE_INPUT":
        return lambda moved, path: moved.value(path) is moved.value(moved.to(given["source_b"]))
    if name not in _OF_A_VALUE:
        raise Unlike(f"nobody knows {name}")
    return lambda moved, path: _OF_A_VALUE[name](moved.value(path), **given)


def constant(value: Any) -> Any:
    """What is equal where values are, and anything else only to itself."""
    if isinstance(value, Tensor):
        return _form(value)
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # 0.0 is equal to -0.0
    if type(value) in (tuple, list):
        return type(value), [constant(item) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value), [(key, constant(item)) for key, item in value.items()]
    if type(value) in (set, frozenset) and all(isinstance(item, PLAIN) for item in value):
        return type(value), {(type(item), repr(item)) for item in value}
    return type(value), id(value)


def _form(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return type(value), id(value)
    form = value.shape, value.stride(), value.dtype, value.device, value.layout
    return type(value), *form, value.requires_grad, value.is_leaf, dispatch_keys(value)


def _forms(tensors: dict[str, Tensor | None]) -> list[Any]:
    return [(name, None if tensor is None else _form(tensor)) for name, tensor in tensors.items()]


def _is_torchs(module: nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.nn.")


def _alike(one: Any, other: Any, to_be_equal: bool) -> bool:
    """Whether it is the same object, or guards tell what is different of it: a number, or a text."""
    if one is other or (not to_be_equal and isinstance(one, PLAIN) and isinstance(other, PLAIN)):
        return True
    return bool(constant(one) == constant(other))
