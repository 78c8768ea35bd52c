"""Write what each pass did to a graph: a table of all passes, and a diff of each that changed anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_zero.compile.passes.base import PassTrace

__all__ = ["write_passes"]

HEADING = ("pass", "ms", "nodes afterwards", "added", "removed", "changed", "moved")


def write_passes(folder: Path, stem: str, traces: Sequence[PassTrace]) -> None:
    """Write ``STEM.txt``, a table with a row for each pass, and ``STEM_NUMBER_PASS.diff`` for each that did anything.

    Args:
        folder: made if it does not exist.
        stem: of the graph's files.
        traces: of the passes, in their order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [HEADING]
    for t in traces:
        counts = (t.nodes, *map(len, (t.added, t.removed, t.changed, t.moved)))
        rows.append((t.name, f"{t.milliseconds:.2f}", *map(str, counts)))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADING))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    (folder / f"{stem}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for number, trace in enumerate(traces):
        if trace.diff:
            (folder / f"{stem}_{number:02}_{trace.name}.diff").write_text(trace.diff, encoding="utf-8")
