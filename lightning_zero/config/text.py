"""What is written about options: docstrings, and the README's tables. And how bytes, and columns, are written for
people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from lightning_zero.config.option import option_fields

__all__ = ["arguments", "document_options", "format_gib", "format_table", "options_table"]

C = TypeVar("C", bound=type)
WIDTH = 116


def format_gib(nbytes: float) -> str:
    """In GiB, without the unit."""
    return f"{nbytes / 2**30:.2f}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Its lines, in columns as wide as what is in them."""
    default_text = [list(heads), *map(list, rows)] if any(heads) else [list(row) for row in rows]
    widths = [max((len(row[column]) for row in default_text), default=0) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in default_text)
    return [f"  {line.rstrip()}" for line in lines]


def arguments(cls: type) -> str:
    """The part of a docstring that describes the options of ``cls``, not indented."""
    lines = ["Args:"]
    for name, (_, known) in option_fields(cls).items():
        lines += textwrap.wrap(f"{name}: {known.text}.", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


def document_options(cls: C) -> C:
    """Adds the options to the class's docstring."""
    assert cls.__doc__ is not None
    cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n{textwrap.indent(arguments(cls), ' ' * 4)}\n    "
    return cls


def options_table(cls: type, groups: dict[str, str] | None = None) -> str:
    """Markdown: a row for each option; with ``groups``, a line with its heading before each group."""
    rows, last = ["| option | default | meaning |", "|---|---|---|"], ""
    for name, (found, known) in option_fields(cls).items():
        if groups is not None and known.group != last:
            last = known.group
            rows.append(f"| **{groups[last]}** | | |")
        text = known.text.replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | {_default(found.default, known.default_text)} | {text} |")
    return "\n".join(rows)


def _default(value: Any, default_text: str | None) -> str:
    assert value is not MISSING
    if default_text is not None:
        return default_text
    word = f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)
    return f"`{word}`"
