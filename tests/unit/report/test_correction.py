"""Estimates that are corrected by what was measured, on numbers that can be checked by hand."""

import pytest

from lightning_zero.report.correction import Measured, compute_factor, estimated_bytes, memory_shift, shifted
from lightning_zero.report.memory import Alive, MemoryPoint, MemoryTimeline
from lightning_zero.report.timeline import Compute, Gather, Reduce, Streams

# A gather of 2 s is waited for by the second node; the first hides one of them.
HALF_HIDDEN = Streams((Compute("a", 1.0), Compute("b", 3.0)), (Gather("w", 0, 1, 2.0),), ())
PLAIN = Streams((Compute("c", 2.0),), (), ())


def test_without_transfers_the_factor_is_a_quotient() -> None:
    assert compute_factor([PLAIN], 5.0) == pytest.approx(2.5)
    assert compute_factor([PLAIN, PLAIN], 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [
        (5.0, 1.0),  # 1, a second of waiting, 3
        (3.5, 0.5),  # 2 of the transfer, then half of 3
        (8.0, 2.0),  # slower compute hides all of the transfer: 2 + 6
        (12.0, 3.0),
    ],
)
def test_waiting_is_what_is_left_of_transfers_beside_the_corrected_compute(seconds: float, factor: float) -> None:
    found = compute_factor([HALF_HIDDEN], seconds)
    assert found == pytest.approx(factor)
    assert HALF_HIDDEN.run(factor).seconds == pytest.approx(seconds)


def test_graphs_run_one_after_the_other() -> None:
    assert compute_factor([HALF_HIDDEN, PLAIN], 5.0 + 2.0) == pytest.approx(1.0)


def test_reduces_that_outlast_compute_count() -> None:
    late = Streams((Compute("a", 1.0),), (), (Reduce("w", 0, 4.0),))
    assert compute_factor([late], 6.0) == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [2.0, 1.0])
def test_where_transfers_alone_take_longer_there_is_no_factor(seconds: float) -> None:
    assert compute_factor([HALF_HIDDEN], seconds) is None


def test_where_nothing_is_computed_there_is_no_factor() -> None:
    assert compute_factor([], 1.0) is None
    assert compute_factor([Streams((Compute("a", 0.0),), (), ())], 1.0) is None


def timeline(held: int, *during: int) -> MemoryTimeline:
    points = tuple(MemoryPoint(str(size), size, size - 1) for size in during)
    return MemoryTimeline(points, max(during), during.index(max(during)), (Alive("x", 1),), held)


def test_memory_is_what_graphs_take_beyond_what_is_there_before() -> None:
    forward, backward = timeline(100, 100, 130, 120), timeline(110, 120, 150, 110)
    assert estimated_bytes([forward, backward]) == 40
    assert memory_shift([forward, backward], 55) == 15
    assert memory_shift([forward, backward], 10) == -30


def test_the_corrected_peak_is_the_measured_one() -> None:
    measured = Measured(1.0, 2.0, 0, peak=1055, resident=1000)
    assert measured.added == 55
    graphs = [timeline(100, 100, 130, 120), timeline(110, 120, 150, 110)]
    by = memory_shift(graphs, measured.added)
    corrected = [shifted(graph, by) for graph in graphs]
    assert estimated_bytes(corrected) == measured.added
    assert [point.during for point in corrected[1].points] == [135, 165, 125]
    assert corrected[1].peak == 165
    assert corrected[1].peak_index == 1


def test_a_timeline_does_not_fall_below_what_is_there_before() -> None:
    lower = shifted(timeline(100, 100, 130, 120), -25)
    assert [point.during for point in lower.points] == [100, 105, 100]
    assert [point.after for point in lower.points] == [99, 104, 100]
    assert lower.peak == 105


def test_memory_that_was_not_measured_is_none() -> None:
    assert Measured(1.0, 2.0, 0).added is None
    assert Measured(1.0, 2.0, 0, peak=3, resident=5).added == 0
