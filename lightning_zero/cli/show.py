"""Tables and lines on a terminal: by Rich where that is installed, and plain otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_zero.config.text import format_table

__all__ = ["format_value", "show_section", "show_table", "print_progress"]


def print_progress(line: str, *values: object) -> None:
    """Progress, beside what a command prints; as a logger's methods, a format and what belongs into it."""
    print(line % values if values else line, file=sys.stderr, flush=True)


def show_section(title: str, facts: Mapping[str, Any]) -> None:
    """Names and what they are."""
    show_table(title, ("", ""), [(name.replace("_", " "), format_value(value)) for name, value in facts.items()])


def show_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """``rows`` have as many columns as there are ``heads``, which may be empty."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("\n".join(["", title, *format_table(heads, rows)]), flush=True)
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=any(heads))
    for number, head in enumerate(heads):
        table.add_column(head, style="cyan" if number == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # what stands in brackets is no markup
    Console().print(table)


def format_value(value: Any) -> str:
    """Of what JSON can hold."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')}: {format_value(held)}" for name, held in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "\n".join(map(format_value, value)) or "none"
    return str(value)
