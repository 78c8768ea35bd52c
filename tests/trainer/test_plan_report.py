"""Report on a real training on two ranks."""

from pathlib import Path

import pytest

from lightning_zero.compile.graph_plan import Plan
from lightning_zero.report import PlanReport
from tests.helpers.trainer import fitted
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
    assert names == [*expected, "plan.json", "plan.txt"]
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
