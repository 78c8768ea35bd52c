"""A chart of step times, the floor as a line: a PNG if matplotlib is installed, an SVG otherwise."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compare.baselines import FLOOR, OURS

__all__ = ["as_svg", "draw"]

OWN, OTHER, LINE = "#4477aa", "#bbbbbb", "#cc3311"
WIDTH, NAMES, BAR, GAP, TOP = 760, 220, 22, 10, 40  # pixels


def draw(rows: Sequence[dict[str, Any]], title: str, folder: Path) -> Path | None:
    """Write ``chart.png`` or ``chart.svg`` into the folder; return None if no row has a time."""
    bars, floor = _bars(rows)
    if not bars:
        return None
    if find_spec("matplotlib") is None:
        path = folder / "chart.svg"
        path.write_text(as_svg(bars, floor, title))
        return path
    path = folder / "chart.png"
    path.write_bytes(_as_png(bars, floor, title))
    return path


def _bars(rows: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, float, bool]], float | None]:
    """Return the bars (title, milliseconds, True if it is ours) and the floor in milliseconds."""
    timed = [row for row in rows if row.get("ms")]
    floor = next((row["ms"] for row in timed if row["peer"] == FLOOR), None)
    return [(row["title"], row["ms"], row["peer"] == OURS) for row in timed if row["peer"] != FLOOR], floor


def _as_png(bars: Sequence[tuple[str, float, bool]], floor: float | None, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which keeps figures in a global list and opens windows.
    drawn = Figure(figsize=(9, 1.0 + 0.4 * len(bars)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    for row, (_, ms, own) in enumerate(bars):
        axes.barh(row, ms, color=OWN if own else OTHER)
        axes.text(ms, row, f" {ms:.1f}", va="center", fontsize=8)
    if floor is not None:
        axes.axvline(floor, color=LINE, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (median)" + ("; dotted: one device, no communication" if floor is not None else ""))
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def as_svg(bars: Sequence[tuple[str, float, bool]], floor: float | None, title: str) -> str:
    """Return the chart as SVG text."""
    most = max([ms for _, ms, _ in bars] + ([floor] if floor is not None else []))
    scale = (WIDTH - NAMES - 70) / most
    height = TOP + len(bars) * (BAR + GAP) + 30
    parts = [f'<text x="10" y="20" font-size="14">{escape(title)}</text>']
    for row, (name, ms, own) in enumerate(bars):
        y, width = TOP + row * (BAR + GAP), ms * scale
        parts += [
            f'<text x="{NAMES - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{OWN if own else OTHER}"/>',
            f'<text x="{NAMES + width + 6:.1f}" y="{y + 15}">{ms:.1f}</text>',
        ]
    if floor is not None:
        x, bottom = NAMES + floor * scale, height - 28
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{LINE}" stroke-dasharray="2 3"/>'
        )
    note = "ms per step (median)" + ("; dotted: one device, no communication" if floor is not None else "")
    parts.append(f'<text x="{NAMES}" y="{height - 10}">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
