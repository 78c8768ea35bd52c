"""Define options once: default, text, check, and the effect of a change on a sharded model.

:func:`options` makes a frozen dataclass whose fields are :func:`option`. Docstrings, the tables of the documentation
and the strategies' signatures are generated from these fields (see ``text.py``).
"""

from __future__ import annotations

import difflib
import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin

from lightning_zero.config.migration_hints import MIGRATION_HINTS

T = TypeVar("T")
Check = Callable[[Any], str | None]  # returns what a wrong value must be, to follow "must be ", or None

SIMILARITY_CUTOFF = 0.4  # of difflib's ratio; finds old and misspelt names, and few others


class OnChange(Enum):
    """Effect of another value that a later Trainer's strategy brings to a sharded model."""

    APPLY = "applied"  # from the next step on
    RECOMPILE = "compiled"
    NEGOTIATE = "negotiated"  # refused if memory would have to move
    REFUSE = "refused"


@dataclass(frozen=True)
class Option:
    """Metadata of an option in addition to its name, type and default.

    Attributes:
        default_text: Default in tables, if its repr says too little.
    """

    text: str
    on_change: OnChange
    check: Check | None = None
    group: str = ""
    default_text: str | None = None


def option(
    text: str,
    *,
    default: Any,
    on_change: OnChange = OnChange.APPLY,
    check: Check | None = None,
    group: str = "",
    default_text: str | None = None,
) -> Any:
    """Return a field for a class of :func:`options`. Types of literals, bool and None need no ``check``."""
    return field(default=default, metadata={"option": Option(text, on_change, check, group, default_text)})


def option_fields(cls: Any) -> dict[str, tuple[Field[Any], Option]]:
    """Return the options of a class by name, without its other fields."""
    return {f.name: (f, f.metadata["option"]) for f in fields(cls) if "option" in f.metadata}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, field))
def options(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that takes keywords and raises ``TypeError`` for unknown names.

    The class has ``owner``, its name for users, and ``suggestions()``, which maps names to how they are written.
    """
    dataclass_type: Any = dataclass(frozen=True, kw_only=True)(cls)
    init, names = dataclass_type.__init__, {f.name for f in fields(dataclass_type)}

    @functools.wraps(init)
    def checked(self: T, **values: Any) -> None:
        for name in values:
            if name not in names:
                hint = MIGRATION_HINTS.get(name) or _suggest(name, dataclass_type.suggestions())
                raise TypeError(f"{dataclass_type.owner} has no option {name!r}. {hint}")
        init(self, **values)

    dataclass_type.__init__, dataclass_type.__repr__ = checked, _repr_of_changes
    return cls


def _suggest(name: str, spellings: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, spellings, 3, SIMILARITY_CUTOFF)
    return (
        f"Did you mean {join_with_or([spellings[n] for n in near])}?" if near else f"There are {', '.join(spellings)}."
    )


def _repr_of_changes(self: Any) -> str:
    values = {f.name: getattr(self, f.name) for f in fields(self)}
    changes = [f"{f.name}={values[f.name]!r}" for f in fields(self) if values[f.name] != f.default]
    return f"{type(self).__name__}({', '.join(changes)})"


def check_options(instance: Any) -> None:
    """Raise ``ValueError`` with an option's name, its value and a valid one, if a value is invalid."""
    hints = typing.get_type_hints(type(instance))
    for name, (_, spec) in option_fields(instance).items():
        value = getattr(instance, name)
        choices = _choices(hints[name])
        if spec.check is not None:
            wrong = spec.check(value)
        else:
            wrong = f"{join_with_or([repr(c) for c in choices])}." if choices and value not in choices else None
        if wrong:
            raise ValueError(f"{name}={value!r} must be {wrong}")


def join_with_or(words: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def check_positive(unit: str, example: int, none: bool = False) -> Check:
    """Return a check for finite numbers above zero; ``none`` also allows None."""

    def check(value: Any) -> str | None:
        if (none and value is None) or (_is_number(value) and 0 < value < math.inf):
            return None
        return f"a positive number of {unit}. Try {example}."

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_mib(value: Any) -> str | None:
    if value is None or (_is_number(value) and value >= 0):
        return None
    return "a number of MiB, 0 or more."


def check_count(value: Any) -> str | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return None
    return "a whole number, 1 or more."


def check_memory(value: Any) -> str | None:
    if value is None or value == "auto" or (_is_number(value) and 0 < value < math.inf):
        return None
    return "a number of GiB above 0, 'auto' for 90 % of the device, or None for no limit."


def check_fraction(value: Any) -> str | None:
    if _is_number(value) and 0 <= value <= 1:
        return None
    return "between 0 (save only the inputs) and 1 (save everything that makes backward fastest)."


OFFLOAD_CHOICES = ("optimizer", "activations", "parameters")
FP8_PRODUCT_CHOICES = ("forward", "input_gradient", "weight_gradient")


def check_subset(choices: tuple[str, ...], example: str, empty: bool = True) -> Check:
    """Return a check for tuples of ``choices``; ``empty`` also allows none of them."""

    def check(value: Any) -> str | None:
        if isinstance(value, tuple) and (value or empty) and all(name in choices for name in value):
            return None
        return f"a tuple of {join_with_or([repr(name) for name in choices])}. Try ({example!r},)."

    return check


def check_patterns(value: Any) -> str | None:
    if isinstance(value, tuple) and all(isinstance(pattern, str) and pattern for pattern in value):
        return None
    return "a tuple of names, in which * stands for any text. Try ('*.router.weight',)."


def check_ratio(value: Any) -> str | None:
    if _is_number(value) and 0 <= value < math.inf:
        return None
    return "a number, 0 or more. Try 1."


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return all values of a type of bools, literals and None; an empty tuple for other types."""
    if hint is bool:
        return (True, False)
    if hint is type(None):
        return (None,)
    if get_origin(hint) is typing.Literal:
        return get_args(hint)
    if get_origin(hint) in (typing.Union, UnionType):
        parts = [_choices(part) for part in get_args(hint)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()
