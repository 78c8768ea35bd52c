"""What is measured of some batches."""

from typing import Any

import pytest
import torch

from lightning_zero.profiling import moments
from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge
from lightning_zero.report.stopwatch import BATCHES, Stopwatch

CPU = torch.device("cpu")


class Clock:
    """Moves on by what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(moments, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def batch(watch: Stopwatch, clock: Clock, forward: float, optimizer: float = 1.0, backwards: int = 1) -> None:
    watch.begin()
    for _ in range(backwards):
        clock.now += forward
        watch.backward_ends()
    clock.now += optimizer
    watch.end()
    clock.now += 100.0  # loading data


def test_medians_of_some_batches(clock: Clock) -> None:
    count = iter(range(0, 10**6, 50))
    watch = Stopwatch(CPU, lambda: next(count))
    for number in range(BATCHES):
        assert not watch.done
        batch(watch, clock, 50.0 if number == 0 else 2.0 + number / 10)
    assert watch.done
    measured = watch.measured()
    assert measured.pass_s == pytest.approx(2.3)
    assert measured.batch_s == pytest.approx(3.3)
    assert measured.gathered == 50
    assert measured.added is None


@pytest.mark.parametrize("backwards", [0, 2])
def test_without_a_single_backward_only_the_batch_is_measured(clock: Clock, backwards: int) -> None:
    watch = Stopwatch(CPU, lambda: 0)
    batch(watch, clock, 2.0, backwards=backwards)
    assert watch.measured().pass_s is None
    assert watch.measured().batch_s == 2.0 * backwards + 1.0


def test_what_is_forgotten_does_not_count(clock: Clock) -> None:
    watch = Stopwatch(CPU, lambda: 0)
    batch(watch, clock, 9.0)
    watch.begin()
    watch.forget()
    clock.now += 9.0
    watch.backward_ends()
    watch.end()
    batch(watch, clock, 2.0)
    assert watch.measured().pass_s == 2.0


class Gauge(MemoryGauge):
    exists = True

    def __init__(self, peaks: list[int]) -> None:
        self.peaks = peaks
        self.starts = 0

    def start(self, anew: bool = False) -> None:
        assert not anew
        self.starts += 1

    def read(self) -> DeviceMemory:
        return DeviceMemory(10**6, 0, 0, self.peaks[self.starts - 1], 100 * self.starts)


def test_the_batch_that_takes_most_tells_the_peak(clock: Clock) -> None:
    gauge: Any = Gauge([150, 290, 360])
    watch = Stopwatch(CPU, lambda: 0, gauge)
    for _ in range(3):
        batch(watch, clock, 1.0)
    measured = watch.measured()
    assert (measured.peak, measured.resident, measured.added) == (290, 200, 90)
