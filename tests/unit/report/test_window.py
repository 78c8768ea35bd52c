"""A window of steps: what is counted in it, and its time without pauses."""

import time

import torch

from lightning_zero.report.step_metrics import EngineCounters, StepWindow

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
