"""Change the learning rate of the following steps by schedulers, as under DDP."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import lr_scheduler

from tests.helpers.callbacks import Lines
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    RTOL,
    Regression,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 2, gamma=0.3), "interval": "step"},
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.1, total_steps=12), "interval": "step"},
    "every second step": lambda o: {
        "scheduler": lr_scheduler.ExponentialLR(o, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "epoch": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    # any loss is above this threshold, so there is a plateau after each epoch
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, factor=0.2, patience=0, threshold=0.9),
        "monitor": "val_loss",
    },
    # down to a rate of zero and up again
    "warm-up, then cosine": lambda o: {
        "scheduler": lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)],
            milestones=[3],
        ),
        "interval": "step",
    },
}


class Scheduled(Regression):
    """Two groups, with rates of their own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim > 1]
        vectors = [param for param in self.parameters() if param.ndim < 2]
        groups = [{"params": matrices, "lr": 0.03}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.name](optimizer)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def _scheduled(kind: str, name: str) -> dict[str, Any]:
    module, lines = Scheduled(name), Lines()
    trainer = make_trainer(
        kind, max_epochs=3, logger=lines, log_every_n_steps=1, callbacks=[LearningRateMonitor(log_weight_decay=True)]
    )
    trainer.fit(module, make_loader(kind), make_loader(kind, 1, seed=1))
    check_captured(trainer)
    logged = [(step, line) for step, line in lines.lines if any(key.startswith("lr-") for key in line)]
    out = {
        "rates": module.rates,
        "logged": [line for _, line in logged],
        "losses": global_losses(kind, module),
        "values": whole_state(module),
    }
    close(module)
    return out


def _all_scheduled(names: list[str], *kinds: str) -> dict[str, dict[str, Any]]:
    return {kind: {name: _scheduled(kind, name) for name in names} for kind in kinds}


QUICK = ["warm-up, then cosine", "epoch", "plateau"]
OTHERS = [name for name in SCHEDULERS if name not in QUICK]


@pytest.mark.parametrize(
    ("names", "kinds"),
    [(QUICK, ["captured"]), pytest.param(OTHERS, ["captured", "eager"], marks=pytest.mark.slow)],
    ids=["three, captured", "others"],
)
@pytest.mark.exhaustive_variants("others")
def test_scheduled_rates_and_what_the_monitor_logs_equal_ddps(ranks: Ranks, names: list[str], kinds: list[str]) -> None:
    for rank, result in enumerate(ranks.run(2, _all_scheduled, names, "ddp", *kinds, deadline=240)):
        ddp = result.pop("ddp")
        for name, expected in ddp.items():
            assert len(set(map(tuple, expected["rates"]))) >= 2, f"{name}: the rate never changes"
            assert len(expected["logged"]) >= 3 * (rank == 0)
            for kind, ours in result.items():
                assert ours[name]["rates"] == expected["rates"], (kind, name)
                assert_close_relative(ours[name], expected, 3 * RTOL, what=f"{kind}, {name}")


class ByHand(Scheduled):
    """Manual optimization: the module steps its schedulers."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())
        if batch_idx % 2:
            self.lr_schedulers().step()


def _by_hand(*kinds: str) -> dict[str, Any]:
    out = {}
    for kind in kinds:
        module = ByHand()
        trainer = make_trainer(kind)
        trainer.fit(module, make_loader(kind, 6))
        check_captured(trainer)
        out[kind] = module.rates, global_losses(kind, module), whole_state(module)
        close(module)
    return out


def test_schedulers_stepped_by_hand_equal_ddps(ranks: Ranks) -> None:
    for result in ranks.run(2, _by_hand, "ddp", "captured"):
        assert len(set(map(tuple, result["ddp"][0]))) == 3
        assert_close_relative(result["captured"], result["ddp"], 3 * RTOL)


class Found(Regression):
    """With a field for the rate that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)


def _found(kind: str) -> dict[str, Any]:
    module = Found()
    finder = pl.callbacks.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=20)
    trainer = make_trainer(kind, max_epochs=2, callbacks=[finder])
    trainer.fit(module, make_loader(kind, 25))
    check_captured(trainer)
    assert finder.optimal_lr is not None
    out = {
        "results": finder.optimal_lr.results,
        "lr": module.lr,
        "used": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "steps": trainer.global_step,
        "losses": global_losses(kind, module),
        "values": whole_state(module),
    }
    close(module)
    return out


def _found_under(*kinds: str) -> dict[str, Any]:
    return {kind: _found(kind) for kind in kinds}


def test_the_rate_that_is_found_and_the_training_after_it_equal_ddps(ranks: Ranks) -> None:
    for result in ranks.run(2, _found_under, "ddp", "captured"):
        ours, ddp = result["captured"], result["ddp"]
        assert ddp["lr"] != 1e-3
        assert ddp["used"] == [ddp["lr"]]
        assert ddp["steps"] == 50
        assert_close_relative(ours, ddp, 10 * RTOL)
