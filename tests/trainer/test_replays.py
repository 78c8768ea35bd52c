"""Forward and backward replayed through the Trainer (emulated on a CPU), which drops gradients between the two."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero import ZeroStrategy
from tests.helpers.oracle import assert_close_relative
from tests.ranks.pool import Ranks
from tests.trainer.helpers import RTOL, Regression, close, make_loader, make_trainer, mean_over_ranks, whole_state

STEPS, EPOCHS = 12, 2


class Replayed(ZeroStrategy):
    def __init__(self) -> None:
        super().__init__(compile_backend="aot_eager")
        self._options = replace(self._options, emulate_graphs=True)


class KeepsItsLosses(Regression):
    """With their graphs, as a user's list of outputs may."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss)
        self.log("loss", loss, on_epoch=True)
        return loss


def fit(strategy: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    module = KeepsItsLosses()
    options = {"strategy": strategy} if strategy is not None else {}
    trainer: pl.Trainer = make_trainer("ddp", max_epochs=EPOCHS, **options, **arguments)
    trainer.fit(module, make_loader("ddp", STEPS), make_loader("ddp", 2, seed=1))
    out = {
        "losses": mean_over_ranks(module.losses),
        "weights": whole_state(module),
        "logged": {name: float(trainer.callback_metrics[name]) for name in ("loss_epoch", "val_loss")},
        "kept": [loss.item() for loss in module.kept] == module.losses,
        "counters": strategy.counters() if strategy is not None else {},
    }
    close(module)
    torch._dynamo.reset()
    return out


def fit_both(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return fit(Replayed(), arguments), fit(None, arguments)


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 5, "gradient_clip_val": 0.2}], ids=str)
def test_replayed_steps_train_and_log_like_ddp(ranks: Ranks, arguments: dict[str, Any]) -> None:
    for ours, ddp in ranks.run(2, fit_both, arguments, deadline=120):
        assert_close_relative(ours["losses"], ddp["losses"], RTOL, what="losses")
        assert_close_relative(ours["weights"], ddp["weights"], RTOL, what="weights")
        assert_close_relative(ours["logged"], ddp["logged"], RTOL, what="what is logged")
        assert ours["kept"], "a loss that the user holds was overwritten"
        # Both ways in which gradients can be met have warmed up by the second epoch.
        assert ours["counters"]["replayed_graphs"] > STEPS
