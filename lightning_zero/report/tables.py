"""The numbers of one graph, as tables of a report."""

from __future__ import annotations

from lightning_zero.report.memory import MemoryTimeline
from lightning_zero.report.page import Table
from lightning_zero.report.summary import GraphSummary
from lightning_zero.report.timeline import Timeline

__all__ = ["graph_tables"]

MOST_ROWS = 12


def graph_tables(
    summary: GraphSummary, timeline: Timeline | None = None, memory: MemoryTimeline | None = None
) -> tuple[Table, ...]:
    """``timeline`` and ``memory`` are the corrected ones, where there are some."""
    facts: list[tuple[str | int | float, ...]] = [
        ("nodes", len(summary.costs)),
        ("GFLOP", sum(cost.flops for cost in summary.costs) / 1e9),
        ("MiB read", sum(cost.read for cost in summary.costs) / 2**20),
        ("MiB written", sum(cost.written for cost in summary.costs) / 2**20),
        ("MiB alive at the peak, estimated", summary.memory.peak / 2**20),
        ("ms of compute, estimated", sum(cost.seconds for cost in summary.costs) * 1e3),
    ]
    if summary.timeline is not None:
        facts += _waits(summary.timeline, "estimated")
    if memory is not None:
        facts.append(("MiB alive at the peak, corrected", memory.peak / 2**20))
    if timeline is not None:
        facts.append(("ms of compute, corrected", sum(run.end - run.start for run in timeline.compute) * 1e3))
        facts += _waits(timeline, "corrected")
    slow = sorted(summary.costs, key=lambda cost: -cost.seconds)[:MOST_ROWS]
    alive = summary.memory.alive[:MOST_ROWS]
    return (
        Table("In short", ("", ""), tuple(facts)),
        Table(
            "Alive at the peak, the largest",
            ("tensor", "MiB"),
            tuple((tensor.name, tensor.nbytes / 2**20) for tensor in alive),
        ),
        Table(
            "Most expensive nodes",
            ("node", "ms, estimated", "GFLOP", "MiB read", "MiB written"),
            tuple((c.name, c.seconds * 1e3, c.flops / 1e9, c.read / 2**20, c.written / 2**20) for c in slow),
        ),
    )


def _waits(timeline: Timeline, how: str) -> list[tuple[str, float]]:
    return [
        (f"ms of waiting for weights, {how}", sum(timeline.exposed) * 1e3),
        (f"ms of reducing beyond the end, {how}", timeline.tail * 1e3),
    ]
