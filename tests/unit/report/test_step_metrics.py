"""Windows of steps, and estimates of exposed communication."""

import time
from dataclasses import replace

import pytest
import torch

from lightning_zero.compile.graph_plan import Gather, GraphPlan, Plan, Reduce
from lightning_zero.report.step_metrics import EngineCounters, StepWindow, exposed_seconds, pass_plans

CPU = torch.device("cpu")


class Engine:
    def __init__(self) -> None:
        self.counted = EngineCounters(100, 50, 7, 3, 2)

    def counts(self) -> EngineCounters:
        return self.counted


def test_counts_are_those_of_the_window() -> None:
    engine = Engine()
    window = StepWindow(CPU, engine.counts)
    window.pass_begins()
    engine.counted = EngineCounters(164, 50, 8, 3, 2)
    window.pass_ends()
    engine.counted = EngineCounters(228, 80, 9, 4, 2)
    window.pass_begins()  # only the first is measured
    window.pass_ends()
    window.end()
    assert window.during == EngineCounters(128, 30, 2, 1, 0)
    assert window.pass_gathered == 64
    seconds = window.pass_seconds()
    assert seconds is not None
    assert 0 <= seconds <= window.seconds()


def test_a_pause_is_left_out() -> None:
    window = StepWindow(CPU, Engine().counts)
    window.resume()  # nothing was paused
    window.pause()
    time.sleep(0.05)
    window.resume()
    window.pause()
    time.sleep(0.05)
    window.end()  # also one that goes on to the end
    whole = window._ended - window._begun
    assert whole >= 0.1
    assert 0 <= window.seconds() <= whole - 0.1
    assert window.over
    assert window.pass_seconds() is None


def gather(name: str, size: int, started_s: float, waited_s: float, transfer_s: float) -> Gather:
    return Gather((name,), "float32", size, 0, "", 0, "", "last use", started_s, waited_s, transfer_s)


# The first weight arrives with nothing to hide it; the second is started at 1 s, waited for at 3 s and takes 3 s.
FORWARD = GraphPlan("forward", 9, (gather("a", 8, 0.0, 0.0, 0.5), gather("b", 16, 1.0, 3.0, 3.0)), (), 4.0)
# A gradient that leaves when 1 of 2 s of compute are over and takes 1.5 s, and one at the very end.
BACKWARD = GraphPlan(
    "backward", 9, (), (Reduce(("a",), "float32", 8, 4, 1.0, 1.5), Reduce(("b",), "float32", 8, 8, 2.0, 0.25)), 2.0
)


def test_compute_waits_for_what_it_cannot_hide() -> None:
    assert exposed_seconds([FORWARD]) == pytest.approx(0.5 + 1.0)
    assert exposed_seconds([BACKWARD]) == pytest.approx(0.5 + 0.25)  # the second one queues after the first
    assert exposed_seconds([FORWARD, BACKWARD]) == pytest.approx(2.25)


def test_a_slower_pass_hides_more() -> None:
    # Compute twice as slow takes 8 s, after 0.5 s for the first weight.
    assert exposed_seconds([FORWARD], 8.5) == pytest.approx(0.5)
    assert exposed_seconds([FORWARD], 0.1) == pytest.approx(1.5), "no factor makes it as fast as that"


def test_a_plan_without_seconds_says_nothing() -> None:
    assert exposed_seconds([replace(FORWARD, compute_s=0.0)]) is None
    assert exposed_seconds([FORWARD, replace(BACKWARD, compute_s=0.0)]) is None
    assert exposed_seconds([]) is None


def test_seconds_travel_with_the_plan() -> None:
    assert GraphPlan.from_json(BACKWARD.to_json()) == BACKWARD
    assert FORWARD.digest == replace(FORWARD, compute_s=9.0).digest, "ranks need not have measured the same"


def test_a_pass_runs_the_last_graphs_for_the_same_weights() -> None:
    newer = replace(FORWARD, compute_s=5.0)
    assert pass_plans(Plan((FORWARD, BACKWARD, newer)), 24) == [newer, BACKWARD]
    assert pass_plans(Plan((FORWARD, BACKWARD)), 48) is None, "each of them twice, or others"
