"""The cost model of passes, measured and nominal."""

import pytest
import torch

from lightning_zero.mesh import Mesh
from lightning_zero.profiling.cost_model import (
    BESIDE_COMPUTE,
    NOMINAL_COSTS,
    CostModel,
    _agreed,
    _gathers,
    measure_costs,
)
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.ranks.pool import Ranks
from tests.unit.compile.graphs import Builder

SPEED = DeviceSpeed({torch.bfloat16: 100.0, torch.float32: 10.0}, 5.0, 0.5)


def test_a_gather_beside_compute_is_slower_than_what_was_measured() -> None:
    costs = CostModel(((100, 1.0), (10000, 4.0)), SPEED)
    for size, alone in ((100, 1.0), (1000, 2.0), (10000, 4.0), (20000, 8.0)):
        assert costs.gather_seconds(size) == pytest.approx(alone / BESIDE_COMPUTE)
    assert costs.gather_seconds(0) == 0.0


def test_a_node_takes_what_its_operations_or_its_bytes_take() -> None:
    b = Builder()
    x, y = b.input("x", 2, 3), b.input("y", 3, 5)
    graph = b.done(b.call(torch.ops.aten.mm.default, x, y))
    # 60 operations at 10 a second; (6 + 15 + 10) * 4 bytes at 5 a second; and a launch
    assert CostModel(((1, 1.0),), SPEED).node_seconds(graph) == [0.0, 0.0, pytest.approx(124 / 5 + 0.5), 0.0]


@pytest.mark.parametrize("samples", [(), ((2, 1.0), (1, 1.0)), ((0, 1.0),), ((1, 0.0),)])
def test_samples_must_grow_and_be_positive(samples: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"gathers=.*by growing bytes"):
        CostModel(samples, SPEED)


def test_larger_gathers_take_longer_and_reach_more_bandwidth() -> None:
    seconds = [NOMINAL_COSTS.gather_seconds(1 << power) for power in range(18, 30)]
    assert seconds == sorted(seconds)
    bandwidths = [(1 << power) / NOMINAL_COSTS.gather_seconds(1 << power) for power in range(18, 30)]
    assert bandwidths == sorted(bandwidths)


def _measured() -> tuple[bool, str]:
    mesh = Mesh.from_world(torch.device("cpu"))
    group, rank = mesh.control_group, mesh.rank
    gathers = _gathers(group, torch.device("cpu"), (1 << 10, 1 << 12))
    mine = DeviceSpeed({torch.float32: 10.0 - rank, torch.bfloat16: 20.0 + rank}, 4.0 + rank, 0.5 * (1 + rank))
    return measure_costs(mesh) is NOMINAL_COSTS, repr(_agreed(gathers, mine, group))


def test_all_ranks_go_by_the_slowest_ones_numbers_and_on_a_cpu_by_fixed_ones(ranks: Ranks) -> None:
    (fixed, costs), *others = ranks.run(2, _measured)
    assert others == [(fixed, costs)]
    assert fixed
    assert "torch.float32: 9.0, torch.bfloat16: 20.0}, bytes_per_s=4.0, launch_s=1.0" in costs
    assert costs.startswith("CostModel(gathers=((1024, ")
