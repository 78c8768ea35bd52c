"""How options are defined: each once, with its default, its text, its check, and what a later Trainer may do to it."""

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

from lightning_zero.config.foreign import FOREIGN

__all__ = ["OnChange", "Option", "option", "option_fields", "options"]

T = TypeVar("T")
Check = Callable[[Any], str | None]  # what is wrong with a value and what to pass, or None

SIMILARITY_CUTOFF = 0.4  # of difflib's ratio: old names and misspelt ones are found, and little else


class OnChange(Enum):
    """What happens when a model is sharded already and the next Trainer's strategy brings another value."""

    APPLY = "applied"  # from the next step on
    RECOMPILE = "compiled"  # applied by compiling again
    NEGOTIATE = "negotiated"  # refused where memory would have to lie elsewhere, see Peers.configure
    REFUSE = "refused"


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name, type and default."""

    text: str
    on_change: OnChange
    check: Check | None = None
    group: str = ""
    default_text: str | None = None  # the default in tables, where its repr says too little


def option(
    text: str,
    *,
    default: Any,
    on_change: OnChange,
    check: Check | None = None,
    group: str = "",
    default_text: str | None = None,
) -> Any:
    """A field of a class of :func:`options`. A type of literals, bool and None needs no ``check``."""
    return field(default=default, metadata={"option": Option(text, on_change, check, group, default_text)})


def option_fields(cls: Any) -> dict[str, tuple[Field[Any], Option]]:
    """The options that a class defines, by name; other fields are left out."""
    return {f.name: (f, f.metadata["option"]) for f in fields(cls) if "option" in f.metadata}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, field))
def options(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass that takes keywords and raises ``TypeError`` for unknown ones. The class has ``owner``,
    what users call it, and ``suggestions()``: names that may have been meant, and how each is written."""
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    init, known = made.__init__, {f.name for f in fields(made)}

    @functools.wraps(init)
    def checked(self: T, **given: Any) -> None:
        for name in given:
            if name not in known:
                instead = FOREIGN.get(name) or _suggest(name, made.suggestions())
                raise TypeError(f"{made.owner} has no option {name!r}. {instead}")
        init(self, **given)

    made.__init__, made.__repr__ = checked, _repr_of_changes
    return cls


def _suggest(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, known, 3, SIMILARITY_CUTOFF)
    return f"Did you mean {join_with_or([known[n] for n in near])}?" if near else f"There are {', '.join(known)}."


def _repr_of_changes(self: Any) -> str:
    """What is not as by default."""
    values = {f.name: getattr(self, f.name) for f in fields(self)}
    others = [f"{f.name}={values[f.name]!r}" for f in fields(self) if values[f.name] != f.default]
    return f"{type(self).__name__}({', '.join(others)})"


def check_options(made: Any) -> None:
    """Raises ``ValueError`` with the option's name, its value and what to pass instead."""
    hints = typing.get_type_hints(type(made))
    for name, (_, known) in option_fields(made).items():
        value = getattr(made, name)
        choices = _choices(hints[name])
        if known.check is not None:
            wrong = known.check(value)
        else:
            wrong = f"must be {join_with_or([repr(c) for c in choices])}." if choices and value not in choices else None
        if wrong:
            raise ValueError(f"{name}={value!r} {wrong}")


def join_with_or(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def check_positive(unit: str, example: int, none: bool = False) -> Check:
    """A finite number above zero; with ``none``, None as well."""

    def check(value: Any) -> str | None:
        if (none and value is None) or (_is_number(value) and 0 < value < math.inf):
            return None
        return f"must be a positive number of {unit}. Try {example}."

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_mib(value: Any) -> str | None:
    if value is None or (_is_number(value) and value >= 0):
        return None
    return "must be a number of MiB, 0 or more."


def check_count(value: Any) -> str | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return None
    return "must be a whole number, 1 or more."


def check_memory(value: Any) -> str | None:
    if value is None or value == "auto" or (_is_number(value) and 0 < value < math.inf):
        return None
    return "must be a number of GiB, more than 0; 'auto', all of the device but a tenth; or None, for no limit."


def check_fraction(value: Any) -> str | None:
    if _is_number(value) and 0 <= value <= 1:
        return None
    return "must lie between 0 (save only the inputs) and 1 (save what makes backward fastest)."


OFFLOAD_CHOICES = ("optimizer", "activations", "parameters")


def check_offload(value: Any) -> str | None:
    if isinstance(value, tuple) and all(name in OFFLOAD_CHOICES for name in value):
        return None
    return f"must be a tuple of {join_with_or([repr(name) for name in OFFLOAD_CHOICES])}. Try ('optimizer',)."


def _choices(hint: Any) -> tuple[Any, ...]:
    """All values of a type, where these are few; empty for any other type."""
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
