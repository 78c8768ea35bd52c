"""Finding private names of torch, some of which a newer torch may no longer have."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

from lightning_zero.compat.versions import install_command, tested
from lightning_zero.errors import UnsupportedError

__all__ = ["ABSENT", "Absent", "find", "module", "private"]


class AbsentError(UnsupportedError, AttributeError):
    """A private name is used that this torch does not have. For ``hasattr`` it has no attributes either."""


class Absent:
    """Placeholder of a private name that this torch does not have. Using it raises ``UnsupportedError``."""

    name: str

    def __init__(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        vars(self).update(name=name, __module__=module, __name__=last, __qualname__=last)

    def __repr__(self) -> str:
        return f"Absent({self.name!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentError(missing(self.name))

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python and inspect look for these
            raise AttributeError(attribute)
        raise AbsentError(missing(self.name))

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise AbsentError(missing(self.name))

    def __instancecheck__(self, instance: Any) -> bool:
        return False  # no object is an instance of a class that is not there

    def __subclasscheck__(self, kind: type) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        name = self.name

        def make(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            raise AbsentError(missing(name))

        return (type("AbsentBase", (), {"__new__": make}),)


ABSENT: dict[str, Absent] = {}


def missing(name: str) -> str:
    """Return the error message about a private name that is missing."""
    return (
        f"torch {torch.__version__} has no {name}, which lightning_zero needs. It was tested with torch "
        f"{tested('torch')}. Install one of these ({install_command()}), or use "
        "strategy='zero3', which compiles nothing and needs few private names."
    )


def find(name: str) -> Any:
    """Return the object of a dotted name of torch.

    Raises:
        LookupError: it, or a module on the way to it, does not exist.
    """
    path, *parts = name.split(".")
    found: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)  # a module that was not imported yet
            except ImportError as error:
                raise LookupError(name) from error
    return found


def private(name: str, *others: str) -> Any:
    """Return the object of the first of some dotted names that exists.

    Returns:
        Absent: where none exists, named after the first.
    """
    for one in (name, *others):
        try:
            return find(one)
        except LookupError:
            continue
    return ABSENT.setdefault(name, Absent(name))


def module(name: str) -> Any:
    """Return a private module of torch, which is imported only if it exists; see :func:`private`."""
    return private(name)
