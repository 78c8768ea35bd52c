"""How long a pass takes, by a device that is behind its host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.memory_planner.step_profiler import StepProfiler
from lightning_zero.profiling.device_gauges import DeviceMemory


class Behind:
    """The device's clock: it has come to its moments up to ``now``, and whoever asks for a later one waits."""

    def __init__(self) -> None:
        self.made = self.reached = 0.0
        self.waits = 0

    def now(self) -> float:
        return self.made

    def is_done(self, moment: float) -> bool:
        return moment <= self.reached

    def between(self, begun: float, ended: float) -> float:
        self.waits += not self.is_done(ended)
        self.reached = max(self.reached, ended)
        return ended - begun


def measuring(captures: bool = False) -> tuple[StepProfiler, Behind]:
    gauge: Any = SimpleNamespace(
        device=torch.device("cpu"),
        captures=captures,
        read=lambda: DeviceMemory(2000, 0, 1700, 0, 0),
        start=lambda anew: None,
        empty=lambda: None,
    )
    some: Any = SimpleNamespace(compiled=1, count=0, counters=dict)
    found, clock = StepProfiler(some, some, some, gauge), Behind()
    found._clock._moments = clock  # type: ignore[assignment]
    return found, clock


def train(measuring: StepProfiler, clock: Behind, steps: list[float], passes: int = 1, copies: float = 7.0) -> None:
    """Steps of which each pass takes so long on the device, and the optimizer's copies behind them."""
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
    assert found.pass_s() == 5.0, "the first quiet step's, as the device has not come to the others"
    clock.reached = clock.made
    assert found.pass_s() == 2.0
    assert clock.waits == 1


def test_nobody_waits_for_later_steps_than_the_first() -> None:
    found, clock = measuring()
    train(found, clock, [90.0, 5.0, 2.0, 3.0, 4.0])
    found.pass_s()
    train(found, clock, [1.0, 1.0])
    found.pass_s()
    assert clock.waits == 1


def test_before_any_step_was_quiet_nothing_is_known() -> None:
    found, clock = measuring()
    train(found, clock, [90.0])
    assert (found.pass_s(), clock.waits) == (0.0, 0)


def test_within_a_capture_no_moment_is_taken() -> None:
    found, clock = measuring(captures=True)
    train(found, clock, [90.0, 5.0, 2.0])
    assert found.pass_s() == 0.0
