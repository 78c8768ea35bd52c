"""What a report writes, when, on which rank, and that its failures stay its own."""

import base64
import gc
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.fx import Graph

from lightning_zero.compile.passes.group import group_gathers
from lightning_zero.compile.passes.grouping import GroupLimits
from lightning_zero.compile.passes.trace import PassTrace
from lightning_zero.compile.plan import Gather, GraphPlan, Plan, Reduce
from lightning_zero.profiling.bandwidth import BandwidthTable
from lightning_zero.profiling.cost import DeviceSpeed
from lightning_zero.profiling.estimate import Costs
from lightning_zero.report import PlanReport
from lightning_zero.report import plan_report as report
from lightning_zero.report.stopwatch import BATCHES
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
PNG = b"\x89PNG\r\n\x1a\n"
SPEED = DeviceSpeed({torch.float32: 1e12}, 1e11, 1e-6)
BANDWIDTH = BandwidthTable(2, ((1 << 10, 1e-5), (1 << 20, 1e-4)), ((1 << 10, 1e-5), (1 << 20, 1e-4)))
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
        self.measured: Costs | None = None
        self.gathered = 0
        self._plan = plan

    def observe_graphs(self, observer: Any) -> None:
        self.observers.append(observer)

    def observe_passes(self, observer: Any) -> None:
        self.pass_observers.append(observer)

    def plan(self) -> Plan:
        return self._plan

    def costs(self) -> Costs | None:
        return self.measured

    def counters(self) -> dict[str, int]:
        return {"gather_bytes": self.gathered}


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
    """What the compiler does with a forward graph."""
    graph = forward(name)
    observe("joint", graph)
    observe("before", graph)
    observe("after", group_gathers(graph, 2, GroupLimits(1 << 20)))


def compiled_backward(observe: Any) -> None:
    observe("before", backward())
    observe("after", backward())


def trainer(strategy: Any, rank: int = 0) -> Any:
    return SimpleNamespace(strategy=strategy, is_global_zero=rank == 0)


def started(
    folder: Path, strategy: Strategy | None = None, rank: int = 0, bandwidth: BandwidthTable = BANDWIDTH
) -> tuple[PlanReport, Any]:
    made = PlanReport(folder, SPEED, bandwidth)
    given = trainer(strategy or Strategy(), rank)
    made.setup(given, MODULE, "fit")
    return made, given


def batch_ends(made: PlanReport, given: Any) -> None:
    made.on_train_batch_end(given, MODULE, None, None, 0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_what_each_pass_did_is_written_on_request(tmp_path: Path) -> None:
    made = PlanReport(tmp_path, SPEED, BANDWIDTH, passes=True)
    given = trainer(Strategy())
    made.setup(given, MODULE, "fit")
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
    html = (tmp_path / "report.html").read_text()
    assert "what pass_0 did" in html
    assert "+forward &lt;b&gt;" in html
    assert html.count("<caption>Passes</caption>") == 2


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
        "graph_00_forward_memory.png",
        "graph_00_forward_overlap.png",
        "graph_01_backward_after.txt",
        "graph_01_backward_before.txt",
        "graph_01_backward_memory.png",
        "graph_01_backward_overlap.png",
        "plan.json",
        "plan.txt",
        "report.html",
        "step.json",
        "step.txt",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in folder.glob("*.png"))
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


def test_the_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    compiled_backward(given.strategy.observers[0])
    batch_ends(made, given)
    html = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|src=\"(?!data:)", html)
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    assert pictures == [path.read_bytes() for path in sorted(tmp_path.glob("*.png"))]
    assert "block.&lt;first&gt;.weight, block.$a_b$.bias" in html
    assert "<first>" not in html
    assert "lightning_zero.gather_group.default([w]" in html
    assert html.count("<details>") == 4


def test_nothing_is_written_while_nothing_new_is_compiled(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    batch_ends(made, given)
    assert files(tmp_path) == []
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    (tmp_path / "report.html").unlink()
    batch_ends(made, given)
    assert "report.html" not in files(tmp_path)


def test_graphs_compiled_later_are_added(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    for name in ("early", "late"):
        compiled(given.strategy.observers[0], name)
        batch_ends(made, given)
    assert "early" in (tmp_path / "graph_00_forward_after.txt").read_text()
    assert "late" in (tmp_path / "graph_01_forward_after.txt").read_text()
    html = (tmp_path / "report.html").read_text()
    assert "<h2>Graph 0, forward</h2>" in html
    assert "<h2>Graph 1, forward</h2>" in html


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown", "on_exception"])
def test_graphs_seen_after_the_last_batch_are_written_at_the_end(tmp_path: Path, hook: str) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    getattr(made, hook)(given, MODULE, *{"teardown": ["fit"], "on_exception": [ValueError()]}.get(hook, []))
    assert "report.html" in files(tmp_path)
    assert "graph_00_forward_after.txt" in files(tmp_path)


def test_fitting_without_compiled_graphs_leaves_a_page_that_says_so(tmp_path: Path) -> None:
    made, given = started(tmp_path, Strategy(Plan()))
    made.on_fit_end(given, MODULE)
    assert "Nothing compiled yet." in (tmp_path / "report.html").read_text()


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
        PlanReport(tmp_path, SPEED, BANDWIDTH).setup(trainer(SimpleNamespace(), rank), MODULE, "fit")


def test_matplotlib_is_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match="pip install matplotlib"):
        PlanReport(tmp_path)


def test_the_device_is_measured_where_nothing_was_given(tmp_path: Path) -> None:
    made = PlanReport(tmp_path)
    given = trainer(Strategy())
    made.setup(given, MODULE, "fit")
    compiled(given.strategy.observers[0])
    batch_ends(made, given)
    assert "graph_00_forward_overlap.png" in files(tmp_path)


def test_a_failure_while_drawing_is_said_once_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> bytes:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, "memory_picture", fail)
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    compiled(given.strategy.observers[0])
    with pytest.warns(UserWarning, match=r"could not draw graph_00_forward: RuntimeError: no ink") as said:
        batch_ends(made, given)
    assert len(said) == 1
    assert "graph_01_forward_after.txt" in files(tmp_path)
    assert "report.html" in files(tmp_path)


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


def test_a_graph_without_a_plan_is_reported_without_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Graph) -> GraphPlan:
        raise ValueError("unreadable")

    monkeypatch.setattr(report, "read_plan", fail)
    made, given = started(tmp_path)
    with pytest.warns(UserWarning, match="could not read a graph's plan: ValueError: unreadable"):
        compiled(given.strategy.observers[0])
    batch_ends(made, given)
    assert "graph_00_forward_memory.png" in files(tmp_path)
    assert "graph_00_forward_overlap.png" not in files(tmp_path)


def test_graphs_are_not_kept(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    graph = group_gathers(forward(), 2, GroupLimits(1 << 20))
    value = weakref.ref(list(graph.nodes)[-2].meta["val"])
    given.strategy.observers[0]("before", graph)
    given.strategy.observers[0]("after", graph)
    del graph
    gc.collect()
    assert value() is None


def train_batch(made: PlanReport, given: Any, gathered: int = 16384) -> None:
    made.on_train_batch_start(given, MODULE, None, 0)
    given.strategy.gathered += gathered
    made.on_after_backward(given, MODULE)
    batch_ends(made, given)


def test_measured_batches_correct_the_report(tmp_path: Path) -> None:
    # Transfers that take next to nothing: what is measured is compute.
    made, given = started(tmp_path, bandwidth=BandwidthTable(2, ((1, 1e-12),), ((1, 1e-12),)))
    train_batch(made, given)
    compiled(given.strategy.observers[0])
    compiled_backward(given.strategy.observers[0])
    for _ in range(BATCHES):
        train_batch(made, given)
        assert "Nothing is measured yet" in (tmp_path / "step.txt").read_text()
    assert not list(tmp_path.glob("*corrected*"))
    train_batch(made, given)
    step = json.loads((tmp_path / "step.json").read_text())
    row = step["step"]["ms of forward and backward"]
    assert row["corrected"] == pytest.approx(row["measured"], rel=1e-3)
    assert step["factor"] > 0
    assert sorted(path.name for path in tmp_path.glob("*corrected*")) == [
        "graph_00_forward_overlap_corrected.png",
        "graph_01_backward_overlap_corrected.png",
    ]
    html = (tmp_path / "report.html").read_text()
    for word in ("estimated", "measured", "corrected", "Memory was not measured"):
        assert word in html
    (tmp_path / "step.json").unlink()
    train_batch(made, given)
    assert "step.json" not in files(tmp_path)


def test_graphs_compiled_later_are_measured_again(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    for name in ("early", "late"):
        compiled(given.strategy.observers[0], name)
        train_batch(made, given)
        assert "Nothing is measured yet" in (tmp_path / "step.txt").read_text()
        for _ in range(BATCHES):
            train_batch(made, given)
        assert "Nothing is measured yet" not in (tmp_path / "step.txt").read_text()


def test_what_the_strategy_has_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSpeed, "of", None)
    made, given = PlanReport(tmp_path), trainer(Strategy())
    given.strategy.measured = Costs(((1 << 10, 1.0),), SPEED)
    made.setup(given, MODULE, "fit")
    assert made._speed is SPEED


def test_a_failure_while_measuring_leaves_the_training_alone(tmp_path: Path) -> None:
    made, given = started(tmp_path)
    compiled(given.strategy.observers[0])
    train_batch(made, given)
    given.strategy.counters = None
    with pytest.warns(UserWarning, match="could not measure a batch: TypeError") as said:
        train_batch(made, given)
    assert len(said) == 1
