"""Extension of griffe: read docstrings as Python has them, and write their roles and literal blocks as Markdown.

Options are added to the docstrings of strategies, ``EngineConfig`` and ``Tuning`` when the classes are made. The source
does not have them.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from griffe import Class, Docstring, Extension, Object

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?(?:[\w.]+\.)?(\w+)`")


def as_markdown(text: str) -> str:
    """Return a docstring with roles as code, and ``::`` before literal blocks as a colon."""
    return re.sub(r"::(?=\n\n? *\n? {4})", ":", ROLE.sub(r"`\1`", text))


def runtime_docstring(cls: type) -> str:
    """Return the class's docstring, with that of ``__init__`` if it has the arguments."""
    text, of_init = inspect.getdoc(cls) or "", inspect.cleandoc(cls.__dict__.get("__init__", None).__doc__ or "")
    return f"{text}\n\n{of_init}" if "Args:" in of_init and "Args:" not in text else text


class RuntimeDocstrings(Extension):
    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        if not cls.path.startswith("lightning_zero.") or cls.docstring is None:
            return
        found: Any = import_module(cls.module.path)
        for name in cls.path.removeprefix(f"{cls.module.path}.").split("."):
            found = getattr(found, name, None)
        if isinstance(found, type) and "__init__" in found.__dict__:
            cls.docstring = Docstring(as_markdown(runtime_docstring(found)), parent=cls, parser=cls.docstring.parser)

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
