"""Change passes at their step without effect on the training, and refuse invalid schedules at setup."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.fx import Graph

from lightning_zero import PassSchedule, PassSpec, ZeroStrategy
from tests.helpers.callbacks import MINIMAL, Count
from tests.helpers.trainer import fitted, make_trainer
from tests.ranks.pool import Ranks

STEPS = 7


class Watch(Callback):
    """Notes which passes ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.observe_passes(lambda trace: self.ran.append(trace.name))


def train(schedule: Any = None, disable: Any = ()) -> dict[str, Any]:
    seen: list[int] = []

    def look(graph: Graph) -> Graph:
        seen.append(len(graph.nodes))
        return graph

    own = PassSpec("look", look, conflicts=frozenset({"started"}), version="1")
    counts, watch = Count(), Watch()
    callbacks: list[Any] = [watch, counts]
    if schedule is not None:
        callbacks = [PassSchedule(schedule, [own]), counts]
    elif disable:
        callbacks = [watch, PassSchedule(disable=disable), counts]
    with fitted("compiled", steps=STEPS, callbacks=callbacks) as (module, trainer):
        kinds = [graph.kind for graph in trainer.strategy.plan().graphs]
        found = {"losses": module.losses, "batches": counts.batches, "seen": len(seen), "kinds": kinds}
        return found | {"ran": watch.ran}


@pytest.fixture(scope="module")
def no_shard_dispatch(ranks: Ranks) -> list[dict[str, Any]]:
    """By all passes in all steps, on each rank."""
    return ranks.run(2, train)


def test_passes_change_at_their_step_and_results_stay(ranks: Ranks, no_shard_dispatch: list[dict[str, Any]]) -> None:
    schedule = [(0, ["look", *MINIMAL]), (3, None), (5, MINIMAL)]
    for plain, scheduled in zip(no_shard_dispatch, ranks.run(2, train, schedule), strict=True):
        assert scheduled["losses"] == plain["losses"]
        assert scheduled["seen"] == 2  # a forward and a backward
        groups = [number for number, _ in scheduled["batches"]]
        # The first step runs eagerly; one by one until step 3, in groups until step 5.
        assert groups[:3] == [0, 0, 0]
        assert all(groups[3:5])
        assert groups[5:] == [0, 0]
        assert scheduled["kinds"].count("forward") >= 2


def test_without_a_pass_that_graphs_can_do_without_the_training_stays_the_same(
    ranks: Ranks, no_shard_dispatch: list[dict[str, Any]]
) -> None:
    off = ["merge_reduces", "group_reduces"]
    for plain, without in zip(no_shard_dispatch, ranks.run(2, train, None, off), strict=True):
        assert without["losses"] == plain["losses"]
        assert set(off) <= set(plain["ran"])
        assert set(without["ran"]) == set(plain["ran"]) - set(off)


def set_up(schedule: Any, kind: str, disable: Any = ()) -> str:
    callback = PassSchedule(schedule, disable=disable)
    trainer = make_trainer(kind, callbacks=[callback])
    try:
        callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    except MisconfigurationException as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("schedule", "kind", "words"),
    [
        ([(0, ["nothing"])], "compiled", "There is no pass 'nothing'"),
        ([(0, ["group_gathers", *MINIMAL[1:]])], "compiled", "'group_gathers' requires ['ordered']"),
        ([(0, None)], "ddp", "this is DDPStrategy. Pass Trainer(strategy='zero3_compile')"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_at_setup(ranks: Ranks, schedule: Any, kind: str, words: str) -> None:
    for message in ranks.run(1, set_up, schedule, kind):
        assert words in message


def test_a_pass_that_graphs_need_is_not_switched_off(ranks: Ranks) -> None:
    (message,) = ranks.run(1, set_up, [], "compiled", ["sink_gathers"])
    assert message.startswith("Graphs cannot do without 'sink_gathers': Pass 'share_gathers' requires ['ordered']")
    (message,) = ranks.run(1, set_up, [], "compiled", ["enqueue_gradients"])
    assert "cannot do without 'enqueue_gradients'" in message


def register(name: str) -> str:
    strategy = make_trainer("compiled").strategy
    assert isinstance(strategy, ZeroStrategy)
    try:
        strategy.register_pass(PassSpec(name, lambda graph: graph))
    except ValueError as error:
        return str(error)
    return ""


def test_a_name_that_is_taken_is_refused(ranks: Ranks) -> None:
    assert "There is a pass named 'fuse_casts' already" in ranks.run(1, register, "fuse_casts")[0]
    assert ranks.run(1, register, "mine")[0] == ""
