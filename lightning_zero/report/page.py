"""One HTML page that holds all it shows: no scripts, no files beside it, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lightning_zero.compile.plan import GraphPlan, Plan

__all__ = ["Section", "Table", "page"]

STYLE = """
body { font-family: system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 90% }
caption { text-align: left; font-weight: bold; padding: 0.3em 0 }
th, td { border-bottom: 1px solid #ddd; padding: 0.2em 0.8em 0.2em 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; display: block; margin: 1em 0 }
pre { overflow-x: auto; background: #f6f6f6; padding: 0.8em; font-size: 80% }
summary { cursor: pointer; margin: 0.4em 0 }
"""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a heading; cells that are numbers are set right."""

    caption: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]


@dataclass(frozen=True)
class Section:
    """What the page says about one graph or another thing: tables, pictures (name, PNG), texts to be unfolded (name,
    text), and paragraphs under the tables."""

    title: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[tuple[str, bytes], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    paragraphs: tuple[str, ...] = ()


def page(title: str, plan: Plan, sections: Sequence[Section]) -> str:
    """The page, from the plan of all graphs and a section for each thing that is shown."""
    parts = [f"<h1>{escape(title)}</h1>", "<h2>Plan</h2>"]
    if not plan.graphs:
        parts.append("<p>Nothing compiled yet.</p>")
    for number, graph in enumerate(plan.graphs):
        parts.extend(_table(table) for table in _plan_tables(number, graph))
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts.extend(_table(table) for table in section.tables)
        parts.extend(f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs)
        for name, png in section.pictures:
            data = base64.b64encode(png).decode()
            parts.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
        for name, text in section.texts:
            parts.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _plan_tables(number: int, graph: GraphPlan) -> Iterable[Table]:
    heading = ("bucket", "weights", "dtype", "MiB", "started before", "node", "waited for by", "node", "kept until")
    yield Table(
        f"Graph {number}, {graph.kind}, {graph.nodes} nodes: gathers",
        heading,
        tuple(
            (i, ", ".join(g.weights), g.dtype, g.bytes / 2**20, g.before, g.started, g.used, g.waited, g.until)
            for i, g in enumerate(graph.gathers)
        ),
    )
    if graph.reduces:
        yield Table(
            f"Graph {number}, {graph.kind}: gradients handed over",
            ("weights", "dtype", "MiB", "node"),
            tuple((", ".join(r.weights), r.dtype, r.bytes / 2**20, r.at) for r in graph.reduces),
        )


def _table(table: Table) -> str:
    heading = "".join(f"<th>{escape(cell)}</th>" for cell in table.heading)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    return f"<table><caption>{escape(table.caption)}</caption>\n<tr>{heading}</tr>\n{rows}</table>"


def _cell(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="number">{value if isinstance(value, int) else f"{value:,.3f}"}</td>'
