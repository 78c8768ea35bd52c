"""Measurements of steady steps, and their reduction over ranks."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.memory_planner.inputs import EngineMemoryFacts, MemoryConfig
from lightning_zero.memory_planner.step_profiler import (
    SteadyStats,
    StepProfiler,
    StepStats,
    measured_inputs,
)
from lightning_zero.profiling.device_gauges import DeviceMemory


class Behind:
    """A device's clock that has reached the moments up to ``reached``; later ones wait."""

    def __init__(self) -> None:
        self.made = self.reached = 0.0
        self.waits = 0

    def now(self) -> float:
        return self.made

    def is_done(self, moment: float) -> bool:
        return moment <= self.reached

    def elapsed_s(self, begun: float, ended: float) -> float:
        self.waits += not self.is_done(ended)
        self.reached = max(self.reached, ended)
        return ended - begun


def measuring(captures: bool = False) -> tuple[StepProfiler, Behind]:
    gauge: Any = SimpleNamespace(
        device=torch.device("cpu"),
        is_capturing=captures,
        read=lambda: DeviceMemory(2000, 0, 1700, 0, 0),
        start=lambda anew: None,
        empty=lambda: None,
    )
    found, clock = StepProfiler(lambda: 1, lambda: 0, gauge), Behind()
    found._timer = clock  # type: ignore[assignment]
    return found, clock


def train(measuring: StepProfiler, clock: Behind, steps: list[float], passes: int = 1, copies: float = 7.0) -> None:
    """Run steps with these seconds for each pass, followed by the optimizer's copies."""
    for seconds in steps:
        for _ in range(passes):
            measuring.pass_begins()
            clock.made += seconds
        measuring.optimizer_steps()
        clock.made += copies
        measuring.optimizer_steps()  # of another optimizer


@pytest.mark.parametrize("passes", [1, 3])
def test_a_pass_takes_what_the_device_needs_until_an_optimizer_steps(passes: int) -> None:
    found, clock = measuring()
    train(found, clock, [90.0, 5.0, 2.0, 3.0, 4.0], passes)
    assert found.pass_seconds() == 5.0, "the first quiet step's, as the device has not come to the others"
    clock.reached = clock.made
    assert found.pass_seconds() == 2.0
    assert clock.waits == 1


def test_nobody_waits_for_later_steps_than_the_first() -> None:
    found, clock = measuring()
    train(found, clock, [90.0, 5.0, 2.0, 3.0, 4.0])
    found.pass_seconds()
    train(found, clock, [1.0, 1.0])
    found.pass_seconds()
    assert clock.waits == 1


def test_before_any_step_was_quiet_nothing_is_known() -> None:
    found, clock = measuring()
    train(found, clock, [90.0])
    assert (found.pass_seconds(), clock.waits) == (0.0, 0)


def test_within_a_capture_no_moment_is_taken() -> None:
    found, clock = measuring(captures=True)
    train(found, clock, [90.0, 5.0, 2.0])
    assert found.pass_seconds() == 0.0


MINE = StepStats(5, room=100, captured_room=-3, forward_s=0.2, traffic=7, saved=60, took=30, pass_s=0.5, passes=2)
OTHERS = [4, 110, -9, 0.1, -8, -50, -40, -0.4, -2]  # of the fields as they are reduced; maxima are negative


def test_of_each_number_the_ranks_take_the_one_that_asks_for_most_care() -> None:
    def least(*mine: float) -> list[float]:
        return [min(pair) for pair in zip(mine, OTHERS, strict=True)]

    expected = {"steps": 4, "room": 100, "captured_room": -9, "forward_s": 0.1, "traffic": 8, "saved": 60, "took": 40}
    assert asdict(MINE.of_all(least)) == expected | {"pass_s": 0.5, "passes": 2}


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_knows_of_replays_where_there_will_be_some(captured: bool) -> None:
    facts = measured_inputs(EngineMemoryFacts(), 1000.0, MINE, captured, MemoryConfig())
    assert facts.peak == (1003 if captured else 900)
    assert (facts.times.forward_s, facts.times.pass_s, facts.times.passes) == (0.2, 0.5, 2)


def test_one_rank_tells_what_its_device_had_left() -> None:
    memory = DeviceMemory(total=1000, others=100, reserved=700, allocated=500, allocated_now=300)
    own = StepStats.of_rank(SteadyStats(steps=3, memory=memory), 0.1, 0.5, lambda total: 0.9 * total)
    assert (own.room, own.took, own.forward_s) == (100, 200, 0.1)
    # Before a capture the cache is emptied, and the graph's memory has few gaps.
    assert own.captured_room == pytest.approx(900 - 100 - 500 - 0.04 * 200)
