"""The allocator's cache is emptied before it would pass a limit, on a simulated device."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_zero.memory_planner.allocator_cache import IDLE_STEPS, MANY_RELEASES, AllocatorCacheLimit, exceeds_limit
from lightning_zero.profiling.device_gauges import DeviceMemory

MIB, TOTAL = 2**20, 80 * 2**30
LIMIT = 6.0  # GiB
OTHERS, STAYS, FORWARD, BACKWARD = 2400, 1300, 1000, 800  # MiB; backward in addition to the saved tensors
PEAK = OTHERS + STAYS + FORWARD + BACKWARD


def memory(cached: int, others: int = OTHERS) -> DeviceMemory:
    return DeviceMemory(TOTAL, others * MIB, 0, 0, 0, cached * MIB)


@pytest.mark.parametrize(
    ("cached", "most", "useless", "expected"),
    [
        (700, 3000, 0, False),  # 2400 + 3000 + 700 are 6100 of 6144
        (800, 3000, 0, True),
        (800, 3000, 790, False),  # almost nothing would be freed
        (90, float("inf"), 0, False),  # almost nothing would be freed
        (100, float("inf"), 0, True),
    ],
)
def test_what_could_pass_the_limit_is_in_the_way(cached: int, most: float, useless: int, expected: bool) -> None:
    assert exceeds_limit(memory(cached), LIMIT * 2**30, most * MIB, useless * MIB) == expected


@dataclass
class Device:
    """A device whose allocator caches everything and reuses nothing, which is the worst case."""

    reports_memory: bool = True
    is_capturing: bool = False
    stuck: int = 0  # MiB that cannot be given back, of graphs
    resident: int = STAYS
    cached: int = 0
    peak: int = 0
    allocated: int = 0
    reads: int = 0
    said: list[str] = field(default_factory=list)

    def read(self) -> DeviceMemory:
        self.reads += 1
        sizes = (0, self.allocated, self.resident, self.cached + self.stuck)
        return DeviceMemory(TOTAL, OTHERS * MIB, *(size * MIB for size in sizes))

    def empty(self) -> None:
        self.cached = 0

    def take(self, nbytes: int, keep: int = 0) -> None:
        """For a moment, and keeps some of it until it is let go of."""
        self.allocated = max(self.allocated, self.resident + nbytes)
        self.peak = max(self.peak, OTHERS + self.stuck + self.resident + self.cached + nbytes)
        self.resident += keep
        self.cached += nbytes - keep

    def let_go(self, nbytes: int) -> None:
        self.resident -= nbytes
        self.cached += nbytes


class Training:
    def __init__(self, limit: Any = LIMIT, **device: Any) -> None:
        self.device, self.limit, self.compiled = Device(**device), limit, 1
        self.cache = AllocatorCacheLimit(self.device, self.device.said.append)  # type: ignore[arg-type]

    def step(self, replayed: bool = False) -> None:
        device, told = self.device, (self.limit, self.compiled)
        self.cache.forward_begins(*told)
        if not replayed:
            device.take(FORWARD, keep=FORWARD)
        self.cache.phase_begins(*told)
        if not replayed:
            device.take(BACKWARD)
            device.let_go(FORWARD)
        self.cache.optimizer_steps(*told)
        self.cache.optimizer_steps(*told)

    def run(self, steps: int, **how: Any) -> int:
        """How many times something was given back."""
        before = self.cache.releases
        for _ in range(steps):
            self.step(**how)
        return self.cache.releases - before


def test_no_step_passes_a_limit_that_what_is_in_tensors_leaves_room_in() -> None:
    held, free = Training(), Training(limit=None)
    held.run(12)
    free.run(3)
    assert free.device.peak > LIMIT * 1024 > held.device.peak == PEAK


def test_where_all_fits_nothing_is_given_back_once_a_step_was_seen() -> None:
    training = Training(limit=40)
    training.run(2)
    assert training.run(5) == 0
    training.compiled += 1  # new code may take more
    assert training.run(2) > 0
    assert training.run(1) == 0


@pytest.mark.parametrize("limit", [None, "auto"])
def test_without_a_number_no_device_is_read(limit: Any) -> None:
    training = Training(limit=limit)
    training.run(3)
    training.cache.evaluates(limit, 1)
    assert (training.device.reads, training.cache.releases) == (0, 0)


def test_a_second_training_without_a_limit_is_left_alone() -> None:
    training = Training()
    assert training.run(3) > 0
    training.limit = None
    assert training.run(3) == 0


@pytest.mark.parametrize("how", [{"reports_memory": False}, {"is_capturing": True}])
def test_nothing_is_asked_where_nothing_can_be_given_back(how: dict[str, bool]) -> None:
    training = Training(**how)
    assert training.run(3) == 0
    assert training.device.reads == 0


def test_memory_of_graphs_is_not_asked_for_again_and_again_and_then_seldom_looked_at() -> None:
    training = Training()
    training.run(3)
    training.device.stuck, training.device.cached = 1800, 0
    assert training.run(IDLE_STEPS, replayed=True) == 1, "once, to learn that nothing comes free"
    before = training.device.reads
    training.run(IDLE_STEPS, replayed=True)
    assert training.device.reads - before == 3, "in the three phases of one step"
    training.device.cached = 1000
    assert training.run(IDLE_STEPS, replayed=True) == 1


def test_what_training_leaves_goes_before_an_evaluation_and_what_its_batches_leave_stays() -> None:
    training = Training()
    training.run(3)
    given = []
    for _ in range(3):
        training.device.cached = 2000
        before = training.cache.releases
        training.cache.evaluates(LIMIT, 1)
        given.append(training.cache.releases - before)
    assert given == [1, 0, 0]
    training.device.cached = 2000
    assert training.run(1) > 0


def test_that_the_device_is_waited_for_in_each_step_is_told_once() -> None:
    training = Training()
    training.run(2 * MANY_RELEASES)
    assert len(training.device.said) == 1
    assert "memory=6.0 is held by emptying" in training.device.said[0]
    assert "1.76 GiB" in training.device.said[0]
