"""Test which trainings certainly have one micro-batch per step."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer

from lightning_zero.integrations.trainer.strategy import has_single_micro_batch


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(pl.LightningModule):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Step(pl.LightningModule):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class Zeros(pl.LightningModule):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


def trainer(module: type[pl.LightningModule], accumulate: int = 1, *callbacks: pl.Callback) -> Any:
    return SimpleNamespace(
        lightning_module=module(), accumulate_grad_batches=accumulate, callbacks=[Timer("00:00:01:00"), *callbacks]
    )


def test_it_is_where_lightning_itself_steps_behind_each_batch() -> None:
    assert has_single_micro_batch(trainer(pl.LightningModule))


@pytest.mark.parametrize(
    "other",
    [
        trainer(Manual),
        trainer(pl.LightningModule, 2),
        trainer(pl.LightningModule, 1, GradientAccumulationScheduler({4: 2})),
        trainer(Backward),
        trainer(Step),
        trainer(Zeros),
    ],
)
def test_it_is_not_where_several_may_come_or_users_step_by_hand(other: Any) -> None:
    assert not has_single_micro_batch(other)
