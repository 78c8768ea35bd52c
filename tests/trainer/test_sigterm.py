"""Check for a SIGTERM over CPUs: a result on the device would make the host wait for it."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.engine import engine_of
from lightning_zero.integrations.checkpoint_files import read_folder
from lightning_zero.integrations.trainer.signals import check_stop_on_cpu
from tests.helpers.command import run
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks
from tests.trainer.launched import check, results

METHOD = "_broadcast_sigterm_tensor"


class Asked(pl.Callback):
    """Before the third batch, one rank gets a SIGTERM after it has looked for one itself."""

    def __init__(self, stop: bool) -> None:
        self.stop = stop
        self.batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        if self.stop and self.batches == 2:
            loop = trainer.fit_loop.epoch_loop
            ask = getattr(loop, METHOD)

            def late() -> None:
                trainer._signal_connector.received_sigterm = dist.get_rank() == 1
                ask()

            setattr(loop, METHOD, late)


def fit(kind: str, stop: bool) -> dict[str, Any]:
    module, asked = Regression(), Asked(stop)
    trainer = make_trainer(kind, callbacks=[asked])
    ended = ""
    with patch.object(_TrainingEpochLoop, METHOD, side_effect=AssertionError("asked on the device")) as own:
        try:
            trainer.fit(module, make_loader(kind, 5))
        except (SIGTERMException, SystemExit) as error:
            ended = type(error).__name__
        calls = own.call_count
    close(module)
    return {
        "ended": ended,
        "batches": asked.batches,
        "calls": calls,
        "left": METHOD in vars(trainer.fit_loop.epoch_loop),
    }


@pytest.mark.parametrize("stop", [False, True])
def test_every_rank_hears_of_it_before_the_same_batch(ranks: Ranks, stop: bool) -> None:
    for found in ranks.run(2, fit, "eager", stop, deadline=60):
        assert found["batches"] == (2 if stop else 5)
        assert found["calls"] == 0
        assert bool(found["ended"]) == stop
        assert not found["left"], "the loop of a Trainer that is done is not as it was"


class Signalled(pl.Callback):
    """Send a SIGTERM to this process in a given batch of training, or of the first validation."""

    def __init__(self, place: str, at: int, ranks: tuple[int, ...]) -> None:
        self.place, self.at, self.ranks = place, at, ranks
        self.seen = {"train": 0, "val": 0}

    def _count(self, place: str) -> None:
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.at and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, *_: Any) -> None:
        self._count("train")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._count("val")


def signalled(*args: Any) -> tuple[str, dict[str, int], bool]:
    module, callback = Regression(), Signalled(*args)
    # gathers are collectives, which keep ranks in step
    trainer = make_trainer("eager", callbacks=[callback], max_epochs=2, gather_transport="collective")
    ended = ""
    try:
        trainer.fit(module, make_loader("eager", 3), make_loader("eager", 5))
    except (SIGTERMException, SystemExit) as error:
        ended = type(error).__name__
    close(module)
    return ended, callback.seen, trainer.received_sigterm


ENDS = {  # all ranks finish the running batch alike
    ("train", 2, (1,)): {"train": 2, "val": 0},
    ("train", 3, (1,)): {"train": 3, "val": 5},  # at the end of an epoch
    ("train", 6, (0,)): {"train": 6, "val": 10},  # at the end of training
    ("val", 1, (1,)): {"train": 3, "val": 5},
    ("val", 1, (0, 1)): {"train": 3, "val": 5},  # a validation runs to its end
    ("val", 5, (0, 1)): {"train": 3, "val": 5},
}


@pytest.mark.parametrize("case", ENDS, ids=str)
def test_a_real_one_ends_all_ranks_after_the_same_batch(ranks: Ranks, case: tuple[Any, ...]) -> None:
    for ended, seen, received in ranks.run(2, signalled, *case, deadline=60):
        assert ended == "SIGTERMException"
        assert received
        assert seen == ENDS[case]


def another_lightning() -> list[bool]:
    trainer = make_trainer("eager")
    loop = trainer.fit_loop.epoch_loop
    with patch.object(_TrainingEpochLoop, METHOD, None):
        undo = check_stop_on_cpu(trainer, dist.group.WORLD)
        found = METHOD in vars(loop)
        undo()
    return [found, METHOD in vars(loop), engine_of(Regression()) is None]


def test_a_lightning_that_asks_in_another_way_is_left_alone(ranks: Ranks) -> None:
    for found in ranks.run(2, another_lightning):
        assert found == [False, False, True]


@pytest.mark.slow
def test_the_processes_of_a_script_save_and_end(native_library: None, tmp_path: Path) -> None:
    """The signal reaches the others a moment later, passed on by the one that started them."""
    home, seen = tmp_path / "saved", tmp_path / "seen"
    seen.mkdir()
    done = run(str(Path(__file__).with_name("terminated.py")), str(home), str(seen), "sharded", cwd=tmp_path)
    check(results(seen), "LightningEnvironment")
    found = sorted(entry.name for entry in home.iterdir())
    assert found == ["last.ckpt", "step=6.ckpt"], done.stdout
    for name in found:
        assert read_folder(home / name, None)["global_step"] == 6
    assert "RankFailedError" not in done.stdout
