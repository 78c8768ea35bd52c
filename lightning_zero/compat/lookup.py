"""Lookup of private names of torch, which a newer torch may lack."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

from lightning_zero.compat.versions import install_command, tested
from lightning_zero.errors import UnsupportedError


class AbsentError(UnsupportedError, AttributeError):
    """Raised on use of a private name that this torch lacks. Makes ``hasattr`` return False."""


class Absent:
    """Placeholder for a private name that this torch lacks. Using it raises ``UnsupportedError``."""

    name: str

    def __init__(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        vars(self).update(name=name, __module__=module, __name__=last, __qualname__=last)

    def __repr__(self) -> str:
        return f"Absent({self.name!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentError(missing(self.name))

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # read by Python and inspect
            raise AttributeError(attribute)
        raise AbsentError(missing(self.name))

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise AbsentError(missing(self.name))

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        name = self.name

        def make(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            raise AbsentError(missing(name))

        return (type("AbsentBase", (), {"__new__": make}),)


ABSENT: dict[str, Absent] = {}


def missing(name: str) -> str:
    """Return the error message about a missing private name."""
    return (
        f"torch {torch.__version__} has no {name}, which lightning_zero needs. It was tested with torch "
        f"{tested('torch')}. Install one of these ({install_command()}), or use "
        "strategy='zero3', which compiles nothing and needs few private names."
    )


def find(name: str) -> Any:
    """Return the object of a dotted name of torch.

    Raises:
        LookupError: it does not exist, or its module does not.
    """
    path, *parts = name.split(".")
    found: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)  # a module that is not imported yet
            except ImportError as error:
                raise LookupError(name) from error
    return found


def private(name: str, *others: str) -> Any:
    """Return the object of the first dotted name that exists.

    Returns:
        An ``Absent`` named after the first, if none exists.
    """
    for one in (name, *others):
        try:
            return find(one)
        except LookupError:
            continue
    return ABSENT.setdefault(name, Absent(name))


def module(name: str) -> Any:
    """Return a private module of torch, like :func:`private`."""
    return private(name)
