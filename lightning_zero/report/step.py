"""The step of a training in numbers: as estimated from its graphs, as measured, and as corrected by what was measured.

Which graphs a step runs is not observed: taken are, of graphs for the same weights, those compiled last, and each once.
Where a step gathers other bytes than these graphs do, they are not what it runs, and nothing is corrected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_zero.report.correction import Measured, compute_factor, estimated_bytes, memory_shift, shifted
from lightning_zero.report.memory import MemoryTimeline
from lightning_zero.report.page import Table
from lightning_zero.report.summary import GraphSummary
from lightning_zero.report.timeline import Timeline

__all__ = ["Step", "correct", "step_graphs"]

NOT_YET = "Nothing is measured yet: that takes some batches in which nothing is compiled."


@dataclass(frozen=True)
class Step:
    """A step's graphs, and what is known of them.

    Attributes:
        graphs: by their number in the report.
        measured: None for nothing yet.
        factor: of the estimated seconds of compute; None where they are not corrected.
        timelines: by number, corrected.
        memories: by number, corrected.
        notes: why something is not measured or not corrected.
    """

    graphs: dict[int, GraphSummary]
    measured: Measured | None = None
    factor: float | None = None
    timelines: dict[int, Timeline] = field(default_factory=dict)
    memories: dict[int, MemoryTimeline] = field(default_factory=dict)
    notes: tuple[str, ...] = (NOT_YET,)

    def rows(self) -> tuple[tuple[str, float | None, float | None, float | None], ...]:
        """What, estimated, measured, corrected; None for what there is not."""
        estimated = [graph.timeline for graph in self.graphs.values() if graph.timeline is not None]
        corrected = list(self.timelines.values())
        added = estimated_bytes([graph.memory for graph in self.graphs.values()])
        raised = estimated_bytes(list(self.memories.values())) / 2**20 if self.memories else None
        real = self.measured or Measured(None, None, 0)
        return (
            ("ms of forward and backward", _ms(estimated, _all), _thousand(real.pass_s), _ms(corrected, _all)),
            ("ms of compute in them", _ms(estimated, _computed), None, _ms(corrected, _computed)),
            ("ms of waiting for weights", _ms(estimated, _waited), None, _ms(corrected, _waited)),
            ("ms of reducing beyond the end", _ms(estimated, _tail), None, _ms(corrected, _tail)),
            ("ms of a batch, with the optimizer's step", None, _thousand(real.batch_s), None),
            ("MiB at the peak, beyond what was there", added / 2**20, _mib(real.added), raised),
            ("MiB at the peak", None, _mib(real.peak), None),
        )

    def table(self) -> Table:
        rows: list[tuple[str | int | float, ...]] = [
            (what, *("" if cell is None else cell for cell in cells)) for what, *cells in self.rows()
        ]
        if self.factor is not None:
            rows.append(("compute corrected by the factor", "", "", self.factor))
        return Table("One pass forward and backward", ("", "estimated", "measured", "corrected"), tuple(rows))

    def text(self) -> str:
        """The table and the notes, as plain text."""
        table = self.table()
        lines = [table.heading, *((str(row[0]), *map(_word, row[1:])) for row in table.rows)]
        text = [f"{line[0]:<42}" + "".join(f"{cell:>14}" for cell in line[1:]) for line in lines]
        return "\n".join([table.caption, *text, *self.notes]) + "\n"

    def to_json(self) -> str:
        """All that is known, in ms and MiB; null for what is not."""
        names = ("estimated", "measured", "corrected")
        step = {what: dict(zip(names, cells, strict=True)) for what, *cells in self.rows()}
        graphs = [
            {
                "graph": number,
                "kind": graph.kind,
                "estimated": _numbers(graph.timeline, graph.memory),
                "corrected": _numbers(self.timelines.get(number), self.memories.get(number)),
            }
            for number, graph in self.graphs.items()
        ]
        real = None if self.measured is None else asdict(self.measured)
        data = {"step": step, "measured": real, "factor": self.factor, "notes": self.notes, "graphs": graphs}
        return json.dumps(data, indent=1) + "\n"


def step_graphs(summaries: Sequence[GraphSummary]) -> dict[int, GraphSummary]:
    """Of the graphs of the same kind for the same weights, the last ones; by number."""
    latest: dict[Any, int] = {}
    for number, summary in enumerate(summaries):
        plan = summary.plan
        touched = [] if plan is None else [*plan.gathers] if summary.kind == "forward" else [*plan.reduces]
        weights = frozenset(name for entry in touched for name in entry.weights)
        latest[summary.kind, weights] = number
    return {number: summaries[number] for number in sorted(latest.values())}


def correct(graphs: dict[int, GraphSummary], measured: Measured) -> Step:
    """The step's graphs, corrected as far as what was measured allows."""
    gathered = sum(gather.bytes for graph in graphs.values() if graph.plan for gather in graph.plan.gathers)
    if gathered != measured.gathered:
        other = (
            f"Nothing is corrected: a batch gathered {measured.gathered / 2**20:.2f} MiB, and these graphs gather "
            f"{gathered / 2**20:.2f} MiB, so a batch does not run each of them once."
        )
        return Step(graphs, measured, notes=(other, *_unmeasured(measured)))
    notes = list(_unmeasured(measured))
    streams = {number: graph.streams for number, graph in graphs.items() if graph.streams is not None}
    factor = None
    if measured.pass_s is not None:
        factor = compute_factor(list(streams.values()), measured.pass_s)
        if factor is None:
            notes.append("Times are not corrected: transfers alone are estimated to take longer than was measured.")
    memories = {}
    if measured.added is not None:
        by = memory_shift([graph.memory for graph in graphs.values()], measured.added)
        memories = {number: shifted(graph.memory, by) for number, graph in graphs.items()}
    timelines = {} if factor is None else {number: work.run(factor) for number, work in streams.items()}
    return Step(graphs, measured, factor, timelines, memories, tuple(notes))


def _unmeasured(measured: Measured) -> list[str]:
    notes = []
    if measured.pass_s is None:
        notes.append("Forward and backward were not measured: a batch had no backward, or several.")
    if measured.added is None:
        notes.append("Memory was not measured: this device does not tell how much is in use.")
    return notes


def _numbers(timeline: Timeline | None, memory: MemoryTimeline | None) -> dict[str, float | None]:
    times = [] if timeline is None else [timeline]
    return {
        "ms": _ms(times, _all),
        "compute_ms": _ms(times, _computed),
        "waiting_ms": _ms(times, _waited),
        "reducing_ms": _ms(times, _tail),
        "peak_mib": None if memory is None else memory.peak / 2**20,
    }


def _all(timeline: Timeline) -> float:
    return timeline.seconds


def _computed(timeline: Timeline) -> float:
    return sum(interval.end - interval.start for interval in timeline.compute)


def _waited(timeline: Timeline) -> float:
    return sum(timeline.exposed)


def _tail(timeline: Timeline) -> float:
    return timeline.tail


def _ms(timelines: Sequence[Timeline], what: Any) -> float | None:
    return 1e3 * sum(map(what, timelines)) if timelines else None


def _thousand(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def _word(cell: object) -> str:
    return f"{cell:,.3f}" if isinstance(cell, float) else str(cell)
