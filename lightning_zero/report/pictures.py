"""Pictures of a graph's memory and of its streams, as PNG.

Drawn with matplotlib's objects rather than ``pyplot``: that one keeps figures in a global list and opens windows.
matplotlib is imported where it is used, so that everything else works without it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from lightning_zero.report.memory import MemoryTimeline
from lightning_zero.report.timeline import Interval, Timeline

__all__ = ["figure", "memory_picture", "overlap_picture", "png"]

BLUE, GREEN, ORANGE, RED = "#4477aa", "#228833", "#ee8866", "#cc3311"
ROWS = ("compute", "gathers", "reduces")


def memory_picture(title: str, timeline: MemoryTimeline) -> bytes:
    """Bytes alive over the nodes of a graph, its peak marked."""
    drawn, axes = figure(title, height=3.2)
    scale, unit = _unit(timeline.peak)
    alive = [point.during / scale for point in timeline.points]
    axes.fill_between(range(len(alive)), alive, step="post", color=BLUE, alpha=0.6, linewidth=0)
    axes.plot([timeline.peak_index], [timeline.peak / scale], "o", color=RED)
    axes.axhline(timeline.peak / scale, color=RED, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(len(alive) - 1, 1))
    axes.set_ylim(0, max(timeline.peak / scale * 1.1, 1e-9))
    axes.set_xlabel("position in the graph, inputs first")
    axes.set_ylabel(f"alive, {unit}")
    return png(drawn)


def overlap_picture(title: str, timeline: Timeline) -> bytes:
    """The streams of a graph over time; where compute stands idle for a gather is red."""
    drawn, axes = figure(title, height=2.6)
    rows = (timeline.compute, timeline.gathers, timeline.reduces)
    for row, (intervals, color) in enumerate(zip(rows, (BLUE, GREEN, ORANGE), strict=True)):
        _bars(axes, row, intervals, color, edge="none" if row == 0 else "white")
    waits = zip(timeline.gathers, timeline.exposed, strict=True)
    _bars(axes, 0, [Interval(g.end - idle, g.end, g.label) for g, idle in waits if idle > 0], RED, edge="none")
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)
    axes.set_xlim(0, max(timeline.seconds * 1e3, 1e-9))
    axes.set_xlabel("ms; red: compute waits for weights")
    return png(drawn)


def _bars(axes: Any, row: int, intervals: Sequence[Interval], color: str, edge: str) -> None:
    spans = [(interval.start * 1e3, (interval.end - interval.start) * 1e3) for interval in intervals]
    if spans:
        axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=color, edgecolors=edge, linewidth=0.5)


def figure(title: str, height: float) -> tuple[Any, Any]:
    """matplotlib's figure and axes; ``height`` in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    # Names of weights may hold dollars and underscores, which are no formulas here.
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def png(drawn: Any) -> bytes:
    """A figure as a file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _unit(nbytes: int) -> tuple[int, str]:
    return next(
        ((1 << bits, unit) for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if nbytes >> bits), (1, "B")
    )
