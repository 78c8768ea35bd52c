"""Times and memory of the parts of steps, by a clock that the test sets."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from lightning_zero.report import step_recorder
from lightning_zero.report.step_recorder import BACKWARD, BETWEEN, FORWARD, MOST_STEPS, OPTIMIZER, StepRecorder


class Clock:
    """Stands for the host's clock, and for the state of compilation."""

    def __init__(self) -> None:
        self.now, self.compiled, self.gathered = 100.0, 0, 0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    with patch("lightning_zero.profiling.device_gauges.perf_counter", made):
        yield made


def recorder(clock: Clock) -> StepRecorder:
    return StepRecorder(torch.device("cpu"), lambda: clock.compiled, lambda: clock.gathered)


def step(
    made: StepRecorder, clock: Clock, number: int, forward: float = 1.0, compiles: bool = False, batches: int = 1
) -> None:
    """A step of ``batches``: ``forward``, twice as long a backward, half a second of the optimizer's, then 0.25."""
    for batch in range(batches):
        made.batch()
        clock.now += forward
        clock.compiled += compiles
        clock.gathered += 1000
        made.part(BACKWARD)
        clock.now += 2 * forward
        made.backward_ended()
        last = batch == batches - 1
        if last:
            made.part(OPTIMIZER)
            clock.now += 0.5
        made.batch_ended(number if last else number - 1)
        clock.now += 0.25


def test_parts_are_measured_and_add_up(clock: Clock) -> None:
    made = recorder(clock)
    for number in (1, 2, 3):
        step(made, clock, number)
    made.batch()
    times = made.times()
    assert times is not None
    assert times.parts == pytest.approx({FORWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 0.5, BETWEEN: 0.25})
    assert times.total_s == pytest.approx(3.75)
    assert (times.steps, times.batches) == (3, 1)
    assert made.gathered_bytes == 1000


def test_micro_batches_are_one_step(clock: Clock) -> None:
    made = recorder(clock)
    for number in (1, 2):
        step(made, clock, number, batches=4)
    made.batch()
    times = made.times()
    assert times is not None
    assert (times.steps, times.batches) == (2, 4)
    assert times.parts == pytest.approx({FORWARD: 4.0, BACKWARD: 8.0, OPTIMIZER: 0.5, BETWEEN: 1.0})


def test_steps_that_compile_are_left_out(clock: Clock) -> None:
    made = recorder(clock)
    for number in range(1, 5):
        step(made, clock, number, forward=90.0 if number == 2 else 1.0, compiles=number == 2)
    made.batch()
    times = made.times()
    assert times is not None
    assert (times.steps, times.slowest_s) == (3, pytest.approx(3.75))


def test_nothing_is_measured_while_each_step_compiles(clock: Clock) -> None:
    made = recorder(clock)
    for number in (1, 2):
        step(made, clock, number, compiles=True)
    assert made.times() is None


def test_the_last_step_counts_without_the_time_after_it(clock: Clock) -> None:
    made = recorder(clock)
    step(made, clock, 1)
    clock.now += 1000
    times = made.times()
    assert times is not None
    assert times.total_s == pytest.approx(3.5)


def test_a_pause_does_not_count(clock: Clock) -> None:
    made = recorder(clock)
    for number in (1, 2):
        step(made, clock, number)
        made.pause()
        clock.now += 1000
        made.resume()
    made.batch()
    times = made.times()
    assert times is not None
    assert times.slowest_s == pytest.approx(3.75)


def test_rare_slow_steps_do_not_move_the_mean(clock: Clock) -> None:
    made = recorder(clock)
    for number in range(1, 9):
        step(made, clock, number, forward=100.0 if number == 5 else 1.0)
    made.batch()
    times = made.times()
    assert times is not None
    assert times.parts[FORWARD] == pytest.approx(1.0)
    assert times.slowest_s == pytest.approx(300.75)


def test_only_the_latest_steps_are_kept(clock: Clock) -> None:
    made = recorder(clock)
    for number in range(1, MOST_STEPS + 20):
        step(made, clock, number, forward=9.0 if number < 15 else 1.0)
    made.batch()
    times = made.times()
    assert times is not None
    assert times.steps == MOST_STEPS
    assert times.slowest_s == pytest.approx(3.75)


def test_memory_is_read_when_parts_end(clock: Clock) -> None:
    made = recorder(clock)
    sizes = iter(range(100, 200))
    with patch.object(step_recorder.StepRecorder, "_bytes", lambda self: next(sizes)):
        step(made, clock, 1)
    assert made.memory == {BETWEEN: 100, FORWARD: 101, BACKWARD: 102, OPTIMIZER: 103}


def test_memory_of_steps_that_compile_is_not_kept(clock: Clock) -> None:
    made = recorder(clock)
    step(made, clock, 1, compiles=True)
    assert made.memory == {}
    step(made, clock, 2)
    assert set(made.memory) == {BETWEEN, FORWARD, BACKWARD, OPTIMIZER}
    assert all(size > 2**20 for size in made.memory.values()), "bytes of this process"


def test_after_a_failure_no_step_is_waited_for_that_the_device_may_never_end(clock: Clock) -> None:
    made, waited = recorder(clock), []
    for number in (1, 2, 3):
        step(made, clock, number)
    stuck_at = clock.now
    step(made, clock, 4)

    def is_done(timer: object, moment: float) -> bool:
        return moment < stuck_at

    def elapsed_s(timer: object, begun: float, ended: float) -> float:
        waited.append(ended)
        return ended - begun

    with patch.multiple(step_recorder.DeviceTimer, is_done=is_done, elapsed_s=elapsed_s):
        made.drop_unfinished()
        times = made.times()
    assert times is not None
    assert times.steps == 2, "the third ends where the fourth begins"
    assert max(waited) < stuck_at
