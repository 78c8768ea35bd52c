"""Events for users, observers and other ranks while a graph is compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.fx import Graph

from lightning_zero.compile import events as compile_timer
from lightning_zero.compile.events import CompileProgress, CompileTimer
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.task_progress import TaskProgress


def test_compiling_is_reported_to_the_watchdog_to_other_ranks_and_to_the_user_if_it_takes_long() -> None:
    others: list[bool] = []
    busy: list[str] = []
    lines: list[str] = []
    shown: list[str] = []
    now = [0.0]
    tasks = TaskProgress(shown.append, clock=lambda: now[0], threaded=False)
    progress = CompileProgress(others.append, busy.append, lines.append, tasks)
    progress.compiling("the whole Net for training", True, 0.0)
    now[0] = 6.0
    tasks.tick()
    progress.compiling("forward 1.0 s", False, 1.25)
    progress.compiling("", False, 1.25)
    now[0] = 100.0
    tasks.tick()
    assert others == [True, False, False]
    assert busy == ["compiling the whole Net for training,", "", ""]
    assert lines == []
    assert shown == ["Compiling the whole Net for training: 6 s"]
    assert progress.compiled == 3


def test_a_store_that_fails_hides_no_exception_of_the_compiler() -> None:
    def fails(busy: bool) -> None:
        raise RuntimeError("the store is gone")

    progress = CompileProgress(fails)
    progress.compiling("a module", False, 0.0)
    assert progress.compiled == 1


def test_observers_see_graphs_and_passes_and_only_they_make_them_wanted() -> None:
    progress, graph = CompileProgress(lambda busy: None), Graph()
    trace = PassTrace("look", 0.1, 0, (), (), (), (), "")
    graphs: list[tuple[str, Graph]] = []
    traces: list[PassTrace] = []
    assert (progress.wants_graphs, progress.wants_passes) == (False, False)
    progress.observe(lambda what, seen: graphs.append((what, seen)))
    assert (progress.wants_graphs, progress.wants_passes) == (True, False)
    progress.observe_passes(traces.append)
    assert progress.wants_passes
    progress.graph("before", graph)
    progress.pass_ran(trace)
    assert graphs == [("before", graph)]
    assert traces == [trace]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    kinds = iter(["forward", "backward"])
    monkeypatch.setattr(compile_timer, "graph_kind", lambda graph: next(kinds))
    return []


def make(told: list[tuple[str, bool]]) -> CompileTimer:
    listener: Any = SimpleNamespace(
        compiling=lambda what, busy, seconds: told.append((what, busy)), tasks=TaskProgress()
    )
    return CompileTimer("'net' (Net)", listener)


def test_forward_and_backward_have_their_seconds(told: list[tuple[str, bool]]) -> None:
    both = make(told)
    for _ in range(2):
        with both.measure(Graph()):
            pass
    assert told == [], "the backend says that it compiles"
    both.end(1.0)
    assert told == [("forward 0.0 s, backward 0.0 s", False)]


def test_a_late_backward_is_told_by_its_module(told: list[tuple[str, bool]]) -> None:
    late = make(told)
    with late.measure(Graph()):
        pass
    late.end(1.0)
    assert told.pop() == ("forward 0.0 s", False)
    with pytest.raises(ValueError, match="broken"), late.measure(Graph()):
        raise ValueError("broken")
    assert told == [("'net' (Net) for training (backward)", True), ("", False)], "also where it fails"


def test_a_graph_out_of_the_cache_was_not_lowered(told: list[tuple[str, bool]]) -> None:
    make(told).end(1.0)
    assert told == [("out of torch's cache", False)]
