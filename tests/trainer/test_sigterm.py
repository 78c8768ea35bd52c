"""Whether to stop for a SIGTERM is asked over CPUs: an answer from the device would make the host wait for it."""

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.engine import engine_of
from lightning_zero.integrations.trainer.sigterm import ask_on_cpu
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks

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


def another_lightning() -> list[bool]:
    trainer = make_trainer("eager")
    loop = trainer.fit_loop.epoch_loop
    with patch.object(_TrainingEpochLoop, METHOD, None):
        undo = ask_on_cpu(trainer, dist.group.WORLD)
        found = METHOD in vars(loop)
        undo()
    return [found, METHOD in vars(loop), engine_of(Regression()) is None]


def test_a_lightning_that_asks_in_another_way_is_left_alone(ranks: Ranks) -> None:
    for found in ranks.run(2, another_lightning):
        assert found == [False, False, True]
