"""Report on a real training on two ranks."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.compile.graph_plan import Plan
from lightning_zero.report import PlanReport
from tests.helpers.browser import find_browser, look_at
from tests.helpers.trainer import INPUTS, fitted, make_loader
from tests.ranks.pool import Ranks

STEPS = 3  # one runs eagerly, one compiles, and one more


def _train(folder: str) -> tuple[list[float], str]:
    report = PlanReport(folder)
    with fitted("compiled", steps=STEPS, callbacks=[report]) as (module, trainer):
        return module.losses, str(trainer.strategy.plan())


def _train_plainly() -> list[float]:
    with fitted("compiled", steps=STEPS) as (module, _):
        return module.losses


@pytest.fixture(scope="module")
def no_shard_dispatch(ranks: Ranks) -> list[list[float]]:
    """Return the losses of the training without a report, by rank."""
    return ranks.run(2, _train_plainly, deadline=90)


def test_training_is_the_same_and_rank_zero_leaves_a_report(
    ranks: Ranks, no_shard_dispatch: list[list[float]], tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    told = ranks.run(2, _train, str(folder), deadline=90)
    assert [losses for losses, _ in told] == no_shard_dispatch
    names = sorted(path.name for path in folder.iterdir())
    expected = [
        f"{stem}_{name}" for stem in ("graph_00_forward", "graph_01_backward") for name in ("after.txt", "before.txt")
    ]
    assert names == [*expected, "plan.json", "plan.txt", "report.html"]
    plan = Plan.load(folder / "plan.json")
    assert str(plan) == told[0][1]
    assert [graph.kind for graph in plan.graphs] == ["forward", "backward"]
    for number, graph in enumerate(plan.graphs):
        lines = (folder / f"graph_{number:02}_{graph.kind}_after.txt").read_text().splitlines()
        numbered = {int(line[:5]): line for line in lines if line[:5].strip()}
        assert len(numbered) == graph.nodes
        for gather in graph.gathers:
            assert "lightning_zero.gather_" in numbered[gather.started]
            assert "wait_tensor" in numbered[gather.waited]
        for reduce in graph.reduces:
            assert "lightning_zero.reduce_" in numbered[reduce.at]


def _train_and_evaluate(folder: str) -> tuple[str, str]:
    """A training with validation, and the pages before and after an evaluation.

    Its callbacks use the model, too.
    """

    class Sample(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.eval()
            with torch.no_grad():
                pl_module(torch.zeros(4, INPUTS))  # compiles a graph
            pl_module.train()

    # The sample's callback is the first, so that it runs before the report's.
    with fitted("compiled", steps=12, callbacks=[Sample(), PlanReport(folder)]) as (module, trainer):
        page = Path(folder) / "report.html"
        before = page.read_text() if trainer.is_global_zero else ""
        trainer.validate(module, make_loader("compiled", 2), verbose=False)
        return before, page.read_text() if trainer.is_global_zero else ""


def _numbers(page: str) -> str:
    return page[page.index("<body>") : page.index("Details</h2>")]


def test_what_was_measured_stays_after_a_sample_and_an_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    (before, after), _ = ranks.run(2, _train_and_evaluate, str(tmp_path), deadline=120)
    assert _numbers(before) == _numbers(after)
    assert re.search(r"[\d.]+ ms <span class=\"measured\">", before)
    assert "No step was measured" not in before
    assert "12 optimizer steps" in before
    assert "Graphs of training (2)" in after
    assert re.search(r"Graphs of evaluation \(\d\)", after)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert any(re.fullmatch(r"graph_\d+_evaluation_after.txt", name) for name in names)
    assert not any("corrected" in name for name in names)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "scale"), [(800, 1), (1440, 2)])
def test_the_page_of_a_training_is_readable_in_a_browser(ranks: Ranks, tmp_path: Path, width: int, scale: int) -> None:
    find_browser()
    ranks.run(2, _train_and_evaluate, str(tmp_path), deadline=120)
    looked = look_at(tmp_path / "report.html", tmp_path, width, scale)
    assert looked.headings[:3] == ["Training report: Regression", "Time of one step", "Memory of one rank"]
    assert (looked.errors, looked.faults) == ([], [])


def _train_watching_passes(folder: str) -> list[float]:
    report = PlanReport(folder, passes=True)
    with fitted("compiled", steps=STEPS, callbacks=[report]) as (module, _):
        return module.losses


def test_what_each_pass_did_is_written_beside_a_training_that_stays_the_same(
    ranks: Ranks, no_shard_dispatch: list[list[float]], tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    watched = ranks.run(2, _train_watching_passes, str(folder), deadline=90)
    assert watched == no_shard_dispatch
    names = sorted(path.name for path in (folder / "passes").iterdir())
    assert "graph_00_forward.txt" in names
    assert "graph_01_backward.txt" in names
    (diff,) = (folder / "passes").glob("graph_01_backward_*_enqueue_gradients.diff")
    lines = diff.read_text().splitlines()
    assert any(line.startswith("-") and "lightning_zero.reduce.default" in line for line in lines)
    assert any(line.startswith("+") and "lightning_zero.reduce_add.default" in line for line in lines)
    rows = (folder / "passes" / "graph_01_backward.txt").read_text().splitlines()
    assert rows[0].split()[:2] == ["pass", "ms"]
    assert [row.split()[0] for row in rows[1:]][-1] == "publish_plan"
