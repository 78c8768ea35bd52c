"""What the compiler is given, and how its debugging backend runs graphs."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from lightning_zero.compile.backend import Compiler, _boxed
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import run_passes
from lightning_zero.compile.passes.pass_trace import PassTrace
from lightning_zero.compile.passes.publish_plan import read_plan
from lightning_zero.compile.plan_book import PlanStore
from lightning_zero.compile.selection import PassSelection
from lightning_zero.config import CompileConfig
from lightning_zero.native import load
from tests.unit.compile.graphs import named_products


class Silent:
    wants_graphs = wants_passes = False

    def graph(self, what: str, graph: Graph) -> None:
        pass

    def pass_ran(self, trace: PassTrace) -> None:
        pass

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        pass

    def add_metric(self, what: str, quota: float) -> None:
        pass

    def report(self, line: str) -> None:
        self.lines.append(line)

    def __init__(self) -> None:
        self.lines: list[str] = []


def test_inputs_are_freed_after_their_last_use() -> None:
    alive: list[bool] = []
    reference: list[weakref.ref[Tensor]] = []

    def look(value: Tensor) -> Tensor:
        alive.append(reference[0]() is not None)
        return value

    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.mul, (x, 2))
    graph.output((graph.call_function(look, (y,)),))
    run = _boxed(GraphModule(torch.nn.Module(), graph))
    inputs = [torch.ones(3)]
    reference.append(weakref.ref(inputs[0]))
    (result,) = run(inputs)
    assert result.tolist() == [2, 2, 2]
    assert inputs == []
    assert alive == [False]


def test_the_guard_that_failed_is_named_where_something_is_compiled_again() -> None:
    load()
    told = Silent()
    for_users = Compiler(PassContext(CompileConfig(backend="aot_eager"), 2), PassSelection(), PlanStore(), told)
    for _ in range(2):  # other arguments are no guard of Dynamo's
        doubled = torch.compile(_doubled, **for_users.arguments())
        assert doubled(torch.ones(4)).tolist() == [2.0] * 4
    assert told.lines == []
    doubled(torch.ones(5))
    (line,) = told.lines
    assert line.startswith("What was compiled before is for other calls: ")
    assert "size mismatch at index 0. expected 4, actual 5" in line
    doubled(torch.ones(6))
    assert len(told.lines) == 1, "sizes are symbols by now"


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def compiler(**options: object) -> Compiler:
    return made(PassContext(CompileConfig(**options), 2))  # type: ignore[arg-type]


def made(context: PassContext, plans: PlanStore | None = None) -> Compiler:
    return Compiler(context, PassSelection(), plans or PlanStore(), Silent())


def test_what_decides_how_graphs_are_rewritten_decides_what_a_cache_may_return() -> None:
    digest = compiler()._digest()
    assert digest == compiler()._digest()
    assert digest != compiler(unsharded_cache_mb=1)._digest()
    assert digest != made(PassContext(CompileConfig(), 3))._digest()
    plans = PlanStore()
    later = made(PassContext(CompileConfig(), 2), plans)
    plans.add(read_plan(run_passes(named_products(), later.passes())))
    assert later._digest() != digest


@pytest.mark.parametrize("name", ["fast_partitioner.py", "backend.py", "estimate.py", "ops.py"])
def test_a_cache_returns_nothing_that_other_code_has_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plain = compiler()._digest(), Path.read_bytes
    changed: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        if path.name == name:
            changed.append(path)
        return plain(path) + b"# mended" * (path.name == name)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert compiler()._digest() != before
    assert changed


def test_backwards_are_not_written_as_code_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    lazy: list[bool] = []
    monkeypatch.setattr(
        "lightning_zero.compile.backend._boxed",
        lambda module: lazy.append(isinstance(module, _LazyGraphModule)) or _boxed(module),
    )
    compiler = Compiler(PassContext(CompileConfig(backend="aot_eager"), 2), PassSelection(), PlanStore(), Silent())
    x = torch.ones(3, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(_doubled, **compiler.arguments())(x).sum().backward()
    torch._dynamo.reset()
    assert lazy[-1], "the backward"
