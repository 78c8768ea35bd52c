"""Render options as docstrings and Markdown tables, and bytes and columns as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from lightning_zero.config.schema import option_fields

C = TypeVar("C", bound=type)
WIDTH = 116
BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def byte_unit(nbytes: float) -> tuple[str, int]:
    """Return the name and the bytes of the largest unit of which a size has at least one."""
    return next(((unit, size) for unit, size in BYTE_UNITS if abs(nbytes) >= size), ("bytes", 1))


def format_bytes(nbytes: float, largest: float | None = None) -> str:
    """Return a size with its unit: GiB, MiB, KiB or bytes.

    Args:
        largest: The largest size of a table, whose unit all sizes of the table get.
    """
    unit, size = byte_unit(nbytes if largest is None else largest)
    decimals = {"GiB": 2, "bytes": 0}.get(unit, 1)
    return f"{nbytes / size:.{decimals}f} {unit}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return the lines of a table with aligned columns. Empty ``heads`` are left out."""
    cells = [list(heads), *map(list, rows)] if any(heads) else [list(row) for row in rows]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [f"{indent}{line.rstrip()}" for line in lines]


def args_section(cls: type) -> str:
    """Return the ``Args`` section of a docstring for the options of ``cls``, without indentation."""
    lines = ["Args:"]
    for name, (_, spec) in option_fields(cls).items():
        lines += textwrap.wrap(f"{name}: {spec.text}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


def document_options(cls: C) -> C:
    """Add the options to the docstring of ``cls``."""
    assert cls.__doc__ is not None
    cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n{textwrap.indent(args_section(cls), ' ' * 4)}\n    "
    return cls


def options_table(cls: type, groups: dict[str, str] | None = None) -> str:
    """Return a Markdown table with a row for each option, and a heading before each of ``groups``."""
    rows, last = ["| option | default | meaning |", "|---|---|---|"], ""
    for name, (found, spec) in option_fields(cls).items():
        if groups is not None and spec.group != last:
            last = spec.group
            rows.append(f"| **{groups[last]}** | | |")
        text = spec.text.replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | {_default(found.default, spec.default_text)} | {text} |")
    return "\n".join(rows)


def _default(value: Any, text: str | None) -> str:
    assert value is not MISSING
    if text is not None:
        return text
    word = f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)
    return f"`{word}`"
