"""Files of a report, their time and rank, and failures that do not stop a training."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.fx import Graph

from lightning_zero.compile.graph_plan import Gather, GraphPlan, Plan, Reduce
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers
from lightning_zero.report import PlanReport, plan_report
from lightning_zero.report.plan_report import write_passes
from tests.helpers.report_numbers import ON_CPU
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
FORWARD = GraphPlan(
    "forward",
    8,
    (Gather(("block.<first>.weight", "block.$a_b$.bias"), "float32", 16384, 2, "gather_group", 3, "mm"),),
    (),
)
BACKWARD = GraphPlan("backward", 6, (), (Reduce(("block.<first>.weight",), "float32", 16384, 4),))
MODULE = LightningModule()


class Strategy:
    """As much of a strategy as a report needs."""

    def __init__(self, plan: Plan = Plan((FORWARD, BACKWARD))) -> None:  # noqa: B008 - frozen
        self.root_device = torch.device("cpu")
        self.observers: list[Any] = []
        self.pass_observers: list[Any] = []
        self._plan = plan

    def observe_graphs(self, observer: Any) -> None:
        self.observers.append(observer)

    def observe_passes(self, observer: Any) -> None:
        self.pass_observers.append(observer)

    def plan(self) -> Plan:
        return self._plan


def forward(name: str = "w") -> Graph:
    b = Builder()
    shard, x = b.shard(name, 2048), b.input("x", 64, 64)
    return b.done(b.call(aten.mm.default, x, b.gather(shard, 64, 64)))


def backward() -> Graph:
    b = Builder()
    shard, x, tangent = b.shard("primals_1", 2048), b.input("x", 64, 64), b.input("tangents_1", 64, 64)
    grad = b.call(aten.mm.default, b.call(aten.t.default, x), tangent)
    b.graph.call_function(torch.ops.lightning_zero.reduce_add.default, (grad, shard))
    return b.done(None)


def compiled(observe: Any, name: str = "w") -> None:
    """Report a forward graph as the compiler does."""
    graph = forward(name)
    observe("joint", graph)
    observe("before", graph)
    observe("after", group_gathers(graph, 2, GroupLimits(1 << 20)))


def compiled_backward(observe: Any) -> None:
    observe("before", backward())
    observe("after", backward())


def trainer(strategy: Any, rank: int = 0) -> Any:
    return SimpleNamespace(strategy=strategy, is_global_zero=rank == 0, global_step=1)


def started(folder: Path, strategy: Strategy | None = None, rank: int = 0) -> tuple[PlanReport, Any]:
    made = PlanReport(folder)
    given = trainer(strategy or Strategy(), rank)
    made.setup(given, MODULE, "fit")
    made.on_train_batch_start(given, MODULE, None, 0)
    return made, given


def batch_ends(made: PlanReport, given: Any) -> None:
    """The batch ends, and the next one begins."""
    made.on_train_batch_end(given, MODULE, None, None, 0)
    made.on_train_batch_start(given, MODULE, None, 1)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_what_each_pass_did_is_written_on_request(tmp_path: Path) -> None:
    made = PlanReport(tmp_path, passes=True)
    given = trainer(Strategy())
    made.setup(given, MODULE, "fit")
    made.on_train_batch_start(given, MODULE, None, 0)
    ((observe,), (watch,)) = given.strategy.observers, given.strategy.pass_observers
    diffs = ("+forward <b>\n", "+backward\n")
    for number, (graph, diff) in enumerate(zip((forward(), backward()), diffs, strict=True)):
        observe("before", graph)
        watch(PassTrace(f"pass_{number}", 0.5, 6, ("neg",), (), (), (), diff))
        observe("after", graph)
    batch_ends(made, given)
    passes = tmp_path / "passes"
    assert files(passes) == [
        "graph_00_forward.txt",
        "graph_00_forward_00_pass_0.diff",
        "graph_01_backward.txt",
        "graph_01_backward_00_pass_1.diff",
    ]
    assert (passes / "graph_00_forward_00_pass_0.diff").read_text() == diffs[0]


def test_passes_are_watched_only_on_request(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    assert given.strategy.pass_observers == []
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    assert "passes" not in files(tmp_path)


def test_a_batch_that_compiled_graphs_ends_with_files(tmp_path: Path) -> None:
    made, given = started(tmp_path / "deep" / "report")
    (observe,) = given.strategy.observers
    compiled(observe)
    compiled_backward(observe)
    assert not (tmp_path / "deep").exists()
    batch_ends(made, given)
    folder = tmp_path / "deep" / "report"
    assert files(folder) == [
        "graph_00_forward_after.txt",
        "graph_00_forward_before.txt",
        "graph_01_backward_after.txt",
        "graph_01_backward_before.txt",
        "plan.json",
        "plan.txt",
    ]
    assert Plan.load(folder / "plan.json") == given.strategy.plan()
    assert (folder / "plan.txt").read_text() == f"{given.strategy.plan()}\n"


def test_the_texts_show_the_graph_before_and_after_the_passes(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0], "my_weight")
    batch_ends(made, given)
    before, after = ((tmp_path / f"graph_00_forward_{name}.txt").read_text() for name in ("before", "after"))
    assert "lightning_zero.gather.default(my_weight, [64, 64], torch.float32)  # float32[64, 64]" in before
    assert "gather_group" not in before
    assert "lightning_zero.gather_group.default([my_weight], torch.float32, 4096)  # float32[4096]" in after
    assert [line[:5].strip() for line in after.splitlines()] == ["", "", "0", "1", "2", "3", "4", ""]
    assert after.splitlines()[-1].strip().startswith("return (mm_default")


def test_nothing_is_written_while_nothing_new_is_compiled(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    batch_ends(made, given)
    assert files(tmp_path) == []
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    (tmp_path / "plan.txt").unlink()
    batch_ends(made, given)
    assert "plan.txt" not in files(tmp_path)


def test_graphs_compiled_later_are_added(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    for name in ("early", "late"):
        compiled(given.strategy.observers[0], name)
        batch_ends(made, given)
    assert "early" in (tmp_path / "graph_00_forward_after.txt").read_text()
    assert "late" in (tmp_path / "graph_01_forward_after.txt").read_text()


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown", "on_exception"])
def test_graphs_seen_after_the_last_batch_are_written_at_the_end(tmp_path: Path, hook: str) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    getattr(made, hook)(given, MODULE, *{"teardown": ["fit"], "on_exception": [ValueError()]}.get(hook, []))
    assert "plan.txt" in files(tmp_path)
    assert "graph_00_forward_after.txt" in files(tmp_path)


def test_graphs_that_no_training_batch_compiled_are_named_evaluation(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    made.on_train_batch_end(given, MODULE, None, None, 0)
    compiled(given.strategy.observers[0])
    made.on_fit_end(given, MODULE)
    assert "graph_00_forward_after.txt" in files(tmp_path)
    assert "graph_01_evaluation_after.txt" in files(tmp_path)


def test_a_later_evaluation_adds_its_graphs_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = Strategy(Plan())
    made, given = started(tmp_path, strategy)
    monkeypatch.setattr(plan_report, "collect_numbers", lambda *_: ON_CPU)
    monkeypatch.setattr(plan_report, "engine_of", lambda _: MagicMock(device=torch.device("cpu")))
    given.global_step, given.optimizers = 1, []
    made.on_train_start(given, MODULE)
    strategy._plan = Plan((FORWARD, BACKWARD))
    compiled(strategy.observers[0])
    made.on_train_batch_end(given, MODULE, None, None, 0)
    made.on_train_epoch_end(given, MODULE)
    made.on_train_end(given, MODULE)
    made.on_fit_end(given, MODULE)
    first = (tmp_path / "report.html").read_text()
    assert "Graphs of training (2)" in first
    assert "Graphs of evaluation (none)" in first

    strategy._plan = Plan((FORWARD, BACKWARD, FORWARD))
    compiled(strategy.observers[0])
    made.teardown(given, MODULE, "validate")
    second = (tmp_path / "report.html").read_text()
    assert "Graphs of training (2)" in second
    assert "Graphs of evaluation (1)" in second
    end = "Details</h2>"
    assert first[: first.index(end)] == second[: second.index(end)]
    assert "199.9 ms" in second


def test_a_manual_training_step_goes_on_after_a_step_of_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = started(tmp_path)
    monkeypatch.setattr(plan_report, "engine_of", lambda _: MagicMock(device=torch.device("cpu")))
    module, weight = LightningModule(), torch.nn.Parameter(torch.ones(2))
    module.automatic_optimization = False
    given.global_step, given.optimizers = 0, [torch.optim.SGD([weight], lr=0.1) for _ in range(2)]
    made.on_train_start(given, module)
    made.on_train_batch_start(given, module, None, 0)
    recorder = made._recorder
    assert recorder is not None
    for optimizer in given.optimizers:
        made.on_before_backward(given, module, weight)
        made.on_after_backward(given, module)
        made.on_before_optimizer_step(given, module, optimizer)
        optimizer.step()
    assert recorder._step is not None
    parts = [name for name, _ in recorder._step.marks]
    assert parts == [*("forward", "backward", "optimizer") * 2, "forward"]
    made.on_train_end(given, module)
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in given.optimizers)


def test_an_exception_ends_the_report_with_the_latest_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = started(tmp_path)
    monkeypatch.setattr(plan_report, "collect_numbers", lambda *numbers: replace(ON_CPU, steps=numbers[-1]))
    monkeypatch.setattr(plan_report, "engine_of", lambda _: MagicMock(device=torch.device("cpu")))
    given.global_step, given.optimizers = 1, []
    made.on_train_start(given, MODULE)
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    assert "1 optimizer steps so far; the training still runs" in (tmp_path / "report.html").read_text()
    given.global_step = 700
    made.on_exception(given, MODULE, KeyboardInterrupt())
    page = (tmp_path / "report.html").read_text()
    assert "700 optimizer steps. " in page
    assert "the training still runs" not in page


def test_an_evaluation_alone_writes_no_page(tmp_path: Path) -> None:
    made = PlanReport(tmp_path)
    (tmp_path / "report.html").write_text("of a training before")
    given = trainer(Strategy())
    made.setup(given, MODULE, "validate")
    compiled(given.strategy.observers[0])
    made.teardown(given, MODULE, "validate")
    assert (tmp_path / "report.html").read_text() == "of a training before"


def test_other_ranks_register_and_write_nothing(tmp_path: Path) -> None:
    made, given = started(tmp_path, rank=1)
    assert given.strategy.observers == []
    batch_ends(made, given)
    made.on_fit_end(given, MODULE)
    made.teardown(given, MODULE, "fit")
    assert files(tmp_path) == []


def test_further_stages_do_not_register_again_but_another_strategy_is_observed(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    made.setup(given, MODULE, "validate")
    assert len(given.strategy.observers) == 1
    other = trainer(Strategy())
    made.setup(other, MODULE, "fit")
    assert len(other.strategy.observers) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_another_strategy_is_refused_on_every_rank(tmp_path: Path, rank: int) -> None:
    with pytest.raises(MisconfigurationException, match=r"this is SimpleNamespace.*strategy='zero3_compile'"):
        PlanReport(tmp_path).setup(trainer(SimpleNamespace(), rank), MODULE, "fit")


def test_a_failure_while_looking_at_a_graph_does_not_reach_the_compiler(tmp_path: Path) -> None:
    made, given = started(tmp_path)

    def broken() -> None:
        given.strategy.observers[0]("before", SimpleNamespace())
        given.strategy.observers[0]("after", SimpleNamespace())

    with pytest.warns(UserWarning, match=r"could not look at a compiled graph: AttributeError") as said:
        broken()
    assert len(said) == 1
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    assert "graph_00_forward_after.txt" in files(tmp_path)


def test_a_folder_that_cannot_be_made_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made, given = started(tmp_path / "file" / "report")
    compiled(given.strategy.observers[0])
    with pytest.warns(UserWarning, match="could not write into"):
        batch_ends(made, given)
    made.on_fit_end(given, MODULE)


def test_graphs_are_not_kept(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    graph = group_gathers(forward(), 2, GroupLimits(1 << 20))
    value = weakref.ref(list(graph.nodes)[-2].meta["val"])
    given.strategy.observers[0]("before", graph)
    given.strategy.observers[0]("after", graph)
    del graph
    gc.collect()
    assert value() is None


SWAP = PassTrace("swap", 1.25, 6, ("neg",), ("relu",), ("mm", "add"), (), "--- before\n+++ after swap\n-relu\n+neg\n")
LOOK = PassTrace("look", 0.5, 6, (), (), (), (), "")


def test_only_passes_that_did_something_leave_a_diff(tmp_path: Path) -> None:
    write_passes(tmp_path / "deep" / "passes", "graph_00_forward", [LOOK, SWAP])
    written = {path.name: path.read_text() for path in (tmp_path / "deep" / "passes").iterdir()}
    assert sorted(written) == ["graph_00_forward.txt", "graph_00_forward_01_swap.diff"]
    assert written["graph_00_forward_01_swap.diff"] == SWAP.diff
    assert [line.split() for line in written["graph_00_forward.txt"].splitlines()] == [
        ["pass", "ms", "nodes", "afterwards", "added", "removed", "changed", "moved"],
        ["look", "0.50", "6", "0", "0", "0", "0"],
        ["swap", "1.25", "6", "1", "1", "2", "0"],
    ]
