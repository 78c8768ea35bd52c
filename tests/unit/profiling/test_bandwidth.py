"""Reading between the measurements, and measuring with a group of two."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_zero.profiling.bandwidth import BandwidthTable, measure
from tests.ranks.pool import Ranks

TABLE = BandwidthTable(4, gather=((100, 1.0), (10000, 4.0)), reduce=((100, 2.0), (1000, 2.0), (10000, 20.0)))


def test_a_measured_size_takes_what_was_measured() -> None:
    assert [TABLE.gather_seconds(size) for size in (100, 10000)] == [1.0, 4.0]
    assert [TABLE.reduce_seconds(size) for size in (100, 1000, 10000)] == [2.0, 2.0, 20.0]


def test_between_two_sizes_logarithms_are_interpolated() -> None:
    assert TABLE.gather_seconds(1000) == pytest.approx(2.0)  # half way from 1 to 4 is 2
    assert TABLE.reduce_seconds(500) == pytest.approx(2.0)
    assert TABLE.reduce_seconds(2000) == pytest.approx(4.0)  # where time grows with the size, it does so in between


def test_a_smaller_transfer_takes_as_long_as_the_smallest() -> None:
    assert TABLE.gather_seconds(1) == 1.0
    assert TABLE.gather_seconds(0) == 0.0


def test_a_larger_transfer_runs_at_the_largest_ones_bandwidth() -> None:
    assert TABLE.gather_seconds(30000) == pytest.approx(12.0)


def test_one_measurement_is_enough() -> None:
    table = BandwidthTable(1, ((100, 1.0),), ((100, 1.0),))
    assert [table.gather_seconds(size) for size in (10, 100, 200)] == [1.0, 1.0, 2.0]


def test_json_gives_the_same_table_back() -> None:
    table = BandwidthTable(3, ((12, 0.1), (24, 1 / 3)), ((12, 1e-9),))
    assert BandwidthTable.from_json(table.to_json()) == table


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"world_size": 2, "gather": [[1]], "reduce": []}', "{"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no bandwidth table"):
        BandwidthTable.from_json(text)


@pytest.mark.parametrize("samples", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, 0.0),)])
def test_samples_must_grow_and_be_positive(samples: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="gather=.*by growing bytes"):
        BandwidthTable(1, samples, ((1, 1.0),))


def _measured() -> tuple[str, str, float]:
    group = dist.group.WORLD
    assert group is not None
    begun = time.perf_counter()
    table = measure(group, torch.device("cpu"))
    seconds = time.perf_counter() - begun
    # A budget of nothing is spent by the first size, and all ranks must stop there.
    short = measure(group, torch.device("cpu"), sizes=(6, 4096), budget_s=0.0)
    return table.to_json(), short.to_json(), seconds


def test_all_ranks_measure_the_same_table(ranks: Ranks) -> None:
    (table, short, seconds), *others = ranks.run(2, _measured)
    assert [(other[0], other[1]) for other in others] == [(table, short)]
    measured = BandwidthTable.from_json(table)
    assert measured.world_size == 2
    assert [size for size, _ in measured.gather] == [size for size, _ in measured.reduce]
    assert measured.gather[0][0] == 4096
    assert len(BandwidthTable.from_json(short).gather) == 1
    assert BandwidthTable.from_json(short).gather[0][0] == 8, "rounded up to whole floats on both ranks"
    assert seconds < 10, "well under a second on an idle machine"
