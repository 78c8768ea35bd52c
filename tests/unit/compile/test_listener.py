"""What the user, observers and other ranks are told while a graph is compiled."""

from torch.fx import Graph

from lightning_zero.compile.events import CompileProgress
from lightning_zero.compile.passes.base import PassTrace


def test_compiling_is_told_to_the_user_the_watchdog_and_the_other_ranks() -> None:
    others: list[bool] = []
    busy: list[str] = []
    lines: list[str] = []
    progress = CompileProgress(others.append, busy.append, lines.append)
    progress.compiling("the whole Net", True, 0.0)
    progress.compiling("forward 1.0 s", False, 1.25)
    progress.compiling("", False, 1.25)
    assert others == [True, False, False]
    assert busy == ["compiling the whole Net,", "", ""]
    assert lines[0] == "Compiling the whole Net; this step takes longer."
    assert lines[1:] == ["Compiled it in 1.2 s (forward 1.0 s).", "Compiled it in 1.2 s."]
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
