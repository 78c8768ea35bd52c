"""Where the seconds of a compilation went, and who says that a late backward is compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.fx import Graph

from lightning_zero.compile import events as compile_timer
from lightning_zero.compile.events import CompileTimer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    kinds = iter(["forward", "backward"])
    monkeypatch.setattr(compile_timer, "graph_kind", lambda graph: next(kinds))
    return []


def make(told: list[tuple[str, bool]]) -> CompileTimer:
    listener: Any = SimpleNamespace(compiling=lambda what, busy, seconds: told.append((what, busy)))
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
    assert told == [("the backward of 'net' (Net) for training", True), ("", False)], "also where it fails"


def test_a_graph_out_of_the_cache_was_not_lowered(told: list[tuple[str, bool]]) -> None:
    make(told).end(1.0)
    assert told == [("out of torch's cache", False)]
