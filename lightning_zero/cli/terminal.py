"""Print tables, lines and progress bars on a terminal, with Rich if it is installed.

Rich is optional. Without it, or if stdout is no terminal, tables are plain text, and there are no bars.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

from lightning_zero.config.text import format_table


def print_progress(line: str, *values: object) -> None:
    """Print a line to stderr, apart from a command's output. Arguments are those of a logger's methods."""
    print(line % values if values else line, file=sys.stderr, flush=True)


def show_section(title: str, facts: Mapping[str, Any]) -> None:
    """Print names and values."""
    show_table(title, ("", ""), [(_title(name), format_value(value)) for name, value in facts.items()])


def _title(name: str) -> str:
    quantity, _, unit = name.rpartition("_")
    return f"{quantity.replace('_', ' ')} (GiB)" if unit == "gib" else name.replace("_", " ")


def show_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. ``rows`` have as many columns as ``heads``, which may be empty strings."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
        print("\n".join(["", *filter(None, [title]), *format_table(heads, lines)]), flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=any(heads))
    for number, head in enumerate(heads):
        table.add_column(head, style="cyan" if number == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, so that brackets are not markup
    Console().print(table)


def format_value(value: Any) -> str:
    """Return a value of JSON as text for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')}: {format_value(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "\n".join(map(format_value, value)) or "none"
    return str(value)


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe function that adds to the number of finished bytes, of ``total``."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield lambda count: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
