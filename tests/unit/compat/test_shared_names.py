"""A private name that a class shares with its base in torch or Lightning is listed in compat."""

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("lightning")

import lightning_zero  # noqa: E402
from tests.helpers.private_names import entries, is_private  # noqa: E402

LISTED = {entry.name.rpartition(".")[2] for entry in entries(Path(lightning_zero.__file__).parent)}
FOREIGN = {"torch", "lightning", "torchmetrics"}


@functools.cache
def own_names(cls: type) -> set[str]:
    """Private names that the class's source gives to methods, to fields and to attributes of ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    # Made in C++ or at run time; SyntaxError: Python 3.13.0 returns lines of another file if __module__ was set.
    except (OSError, TypeError, SyntaxError):
        return {name for name in vars(cls) if is_private(name)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif of_self:
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def our_classes() -> Iterator[type]:
    seen = set()
    for found in pkgutil.walk_packages(lightning_zero.__path__, "lightning_zero."):
        if found.name.endswith(".__main__"):  # Python warns if it then runs the package as a program
            continue
        for value in vars(importlib.import_module(found.name)).values():
            if inspect.isclass(value) and value.__module__.startswith("lightning_zero.") and value not in seen:
                seen.add(value)
                yield value


def shared(cls: type) -> set[str]:
    bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] in FOREIGN]
    return own_names(cls) & set().union(*map(own_names, bases))


CLASSES = [cls for cls in our_classes() if any(base.__module__.split(".")[0] in FOREIGN for base in cls.__mro__)]


def test_classes_were_found() -> None:
    assert {"ZeroStrategy", "ZeroPrecision", "GatheredWeight"} <= {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", [pytest.param(cls, id=cls.__name__) for cls in CLASSES])
def test_shared_names_are_listed(cls: type) -> None:
    assert shared(cls) <= LISTED, f"list them in compat, or call them otherwise: {shared(cls) - LISTED}"


def test_overrides_are_found() -> None:
    class Ours(nn.Module):
        _version = 2  # of torch's own, in C++ or Python

        def __init__(self) -> None:
            super().__init__()
            self._buffers: Any = {}
            self._own = 1

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return self

    assert shared(Ours) == {"_version", "_buffers", "_apply"}
