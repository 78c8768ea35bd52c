"""Test the lines about long tasks, with a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lightning_zero import task_progress
from lightning_zero.task_progress import FIRST_LINE_S, LINE_INTERVAL_S, TaskProgress


class Shown:
    """A progress without a thread, its clock and its lines."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.tasks = TaskProgress(self.lines.append, lambda: self.now, threaded=False)

    def passes(self, seconds: float) -> None:
        """Let time pass as a thread would see it."""
        for _ in range(round(4 * seconds)):
            self.now += 0.25
            self.tasks.tick()


def test_a_short_task_shows_nothing() -> None:
    shown = Shown()
    with shown.tasks.task("Compiling 'net'"):
        shown.passes(FIRST_LINE_S - 0.5)
    shown.passes(100)
    assert shown.lines == []


def test_a_long_task_shows_a_line_at_first_and_then_one_every_ten_seconds() -> None:
    shown = Shown()
    with shown.tasks.task("Compiling 'net'"):
        shown.tasks.stage("tracing")
        shown.passes(12)
        shown.tasks.stage("forward")
        shown.passes(20)
    assert LINE_INTERVAL_S == 10
    assert shown.lines == [
        "Compiling 'net': 5 s (tracing)",
        "Compiling 'net': 15 s (forward)",
        "Compiling 'net': 25 s (forward)",
    ]


def test_an_inner_task_is_named_with_the_time_of_the_outer_one() -> None:
    shown = Shown()
    with shown.tasks.task("Compiling 'net'"):
        shown.passes(4)
        with shown.tasks.task("Compiling 'net' for training"):
            shown.passes(2)
        shown.passes(10)
    assert shown.lines == ["Compiling 'net' for training: 5 s", "Compiling 'net': 15 s"]


def test_a_task_without_an_end_ends_with_the_task_around_it() -> None:
    shown = Shown()
    with pytest.raises(ValueError, match="broken"), shown.tasks.task("outer"):
        shown.tasks.begin("inner")
        raise ValueError("broken")
    shown.tasks.end()  # late
    shown.passes(100)
    assert shown.lines == []


def test_without_a_place_to_show_lines_there_is_no_thread() -> None:
    before = threading.active_count()
    tasks = TaskProgress()
    with tasks.task("Compiling"):
        assert threading.active_count() == before
        tasks.stage("forward")
        tasks.tick()


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(1000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen within 10 s")


def test_a_thread_shows_the_lines_and_ends_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(task_progress, "LINE_INTERVAL_S", 0.01)
    lines: list[str] = []
    tasks = TaskProgress(lines.append)

    def running() -> bool:
        return any(thread.name == "lightning_zero-progress" for thread in threading.enumerate())

    with tasks.task("Building the C++ executor"):
        assert running()
        until(lambda: len(lines) > 1)
    until(lambda: not running())
    assert lines[0] == "Building the C++ executor: 0 s"
