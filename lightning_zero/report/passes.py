"""What each pass did to a graph: a table of all passes, and a diff of each that did anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_zero.compile.passes.trace import PassTrace
from lightning_zero.report.page import Table

__all__ = ["pass_table", "write_passes"]

HEADING = ("pass", "ms", "nodes afterwards", "added", "removed", "changed", "moved")


def pass_table(traces: Sequence[PassTrace]) -> Table:
    """A row for each pass, in the order in which they ran."""
    rows = tuple(
        (t.name, t.milliseconds, t.nodes, len(t.added), len(t.removed), len(t.changed), len(t.moved)) for t in traces
    )
    return Table("Passes", HEADING, rows)


def write_passes(folder: Path, stem: str, traces: Sequence[PassTrace]) -> None:
    """Writes ``STEM.txt``, the table, and ``STEM_NUMBER_PASS.diff`` for each pass that did anything.

    Args:
        folder: made if it does not exist.
        stem: of the graph's files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [HEADING, *(tuple(map(_cell, row)) for row in pass_table(traces).rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADING))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    (folder / f"{stem}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for number, trace in enumerate(traces):
        if trace.diff:
            (folder / f"{stem}_{number:02}_{trace.name}.diff").write_text(trace.diff, encoding="utf-8")


def _cell(value: str | int | float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
