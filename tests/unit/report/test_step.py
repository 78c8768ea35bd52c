"""Which graphs a step is taken to run, what is corrected, and what is said where something is not."""

import json
from typing import Any

import pytest

from lightning_zero.compile.plan import Gather, GraphPlan, Reduce
from lightning_zero.report.correction import Measured
from lightning_zero.report.memory import MemoryPoint, MemoryTimeline
from lightning_zero.report.step import NOT_YET, Step, correct, step_graphs
from lightning_zero.report.summary import GraphSummary
from lightning_zero.report.timeline import Compute, Streams

MIB = 2**20


def summary(kind: str = "forward", weights: str = "ab", seconds: float = 1.0, peak: int = 10, size: int = 4) -> Any:
    gathers = (Gather(tuple(weights), "float32", size * MIB, 0, "", 0, ""),)
    reduces = (Reduce(tuple(weights), "float32", 8, 0),) if kind == "backward" else ()
    streams = Streams((Compute("mm", seconds),), (), ())
    memory = MemoryTimeline((MemoryPoint("mm", peak * MIB, 0),), peak * MIB, 0, (), 2 * MIB)
    return GraphSummary(kind, "", "", (), memory, GraphPlan(kind, 1, gathers, reduces), streams, streams.run())


GRAPHS = {0: summary(), 1: summary("backward", seconds=3.0, peak=16)}


def cells(step: Step) -> dict[str, tuple[float | None, ...]]:
    return {what: tuple(rest) for what, *rest in step.rows()}


def test_of_graphs_for_the_same_weights_the_last_ones_run() -> None:
    summaries = [summary(), summary("backward"), summary(weights="c"), summary(), summary("backward")]
    assert list(step_graphs(summaries)) == [2, 3, 4]


def test_before_anything_is_measured_there_are_estimates_and_a_note() -> None:
    step = Step(GRAPHS)
    assert cells(step)["ms of forward and backward"] == (4000.0, None, None)
    assert cells(step)["MiB at the peak, beyond what was there"] == (14.0, None, None)
    assert step.notes == (NOT_YET,)
    assert NOT_YET in step.text()
    assert json.loads(step.to_json())["measured"] is None


def test_what_is_corrected_matches_what_was_measured() -> None:
    step = correct(GRAPHS, Measured(6.0, 7.0, 8 * MIB, peak=120 * MIB, resident=100 * MIB))
    found = cells(step)
    assert found["ms of forward and backward"] == pytest.approx((4000.0, 6000.0, 6000.0))
    assert found["ms of a batch, with the optimizer's step"] == (None, 7000.0, None)
    assert found["MiB at the peak, beyond what was there"] == (14.0, 20.0, 20.0)
    assert found["MiB at the peak"] == (None, 120.0, None)
    assert step.factor == pytest.approx(1.5)
    assert [memory.peak // MIB for memory in step.memories.values()] == [16, 22]
    assert step.notes == ()
    data = json.loads(step.to_json())
    assert data["step"]["ms of forward and backward"] == pytest.approx(
        {"estimated": 4000.0, "measured": 6000.0, "corrected": 6000.0}
    )
    assert data["graphs"][1]["estimated"]["compute_ms"] == 3000.0
    assert data["graphs"][1]["corrected"]["compute_ms"] == pytest.approx(4500.0)
    assert step.table().heading == ("", "estimated", "measured", "corrected")


def test_memory_that_was_not_measured_is_said_and_not_corrected() -> None:
    step = correct(GRAPHS, Measured(6.0, 7.0, 8 * MIB))
    assert step.memories == {}
    assert step.factor == pytest.approx(1.5)
    assert [note.startswith("Memory was not measured") for note in step.notes] == [True]


def test_time_that_was_not_measured_is_said_and_not_corrected() -> None:
    step = correct(GRAPHS, Measured(None, 7.0, 8 * MIB, peak=3, resident=1))
    assert step.timelines == {}
    assert list(step.memories) == [0, 1]
    assert "a batch had no backward, or several" in step.text()


def test_graphs_that_a_batch_does_not_run_once_are_not_corrected() -> None:
    step = correct(GRAPHS, Measured(6.0, 7.0, 16 * MIB, peak=3, resident=1))
    assert (step.factor, step.timelines, step.memories) == (None, {}, {})
    assert "a batch gathered 16.00 MiB, and these graphs gather 8.00 MiB" in step.text()
    assert cells(step)["ms of forward and backward"] == (4000.0, 6000.0, None)


def test_graphs_without_compute_are_not_corrected() -> None:
    step = correct({0: summary(seconds=0.0)}, Measured(6.0, 7.0, 4 * MIB))
    assert step.factor is None
    assert "Times are not corrected" in step.text()
