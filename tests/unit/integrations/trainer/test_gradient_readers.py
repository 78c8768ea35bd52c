"""Modules and callbacks that may read gradients are found by the names in their code."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.utilities import grad_norm

from lightning_zero.integrations.trainer.gradient_readers import may_read_gradients


class Plain(pl.LightningModule):
    def training_step(self, batch: Any, index: int) -> Any:
        with torch.no_grad():
            frozen = [param for param in self.parameters() if not param.requires_grad]
        self.log("frozen", len(frozen))
        return batch.sum()


class Helper(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        helper(self)


class Later(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class ByName(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.found = [getattr(p, "grad") for p in self.parameters()]  # noqa: B009


class Logs(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.log_dict(grad_norm(module, 2))


class StepsAgain(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.optimizers[0].step()


class Counts(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps = trainer.global_step


class StepsByName(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.step = 1
        optimizer = trainer.optimizers[0]
        optimizer.step()


class StepsInside(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        each(trainer.optimizers, lambda optimizer: optimizer.step())


class StepsScheduledOptimizer(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        scheduled_optim = trainer.optimizers[0]
        scheduled_optim.step()


class StepsEither(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        scheduler = None
        (trainer.optimizers[0] if scheduler is None else scheduler).step()


class StepsByString(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        getattr(trainer.optimizers[0], "step")()  # noqa: B009


class StepsByFunction(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        each(self, step)


class StepsByAttribute(pl.Callback):
    def __init__(self) -> None:
        self.step = torch.optim.SGD([torch.zeros(1)]).step

    def on_train_batch_end(self, *_: Any) -> None:
        self.step()


class StepOfItsOwn(Plain):
    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, index: int) -> Any:
        self.step += 1
        return self.shared_step(batch, self.step)

    def shared_step(self, batch: Any, step: int) -> Any:
        return batch.sum() * step


class Profiles(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.profiler.step()
        scheduler = module.lr_schedulers()
        scheduler.step()


def each(values: Any, call: Any) -> None:
    for value in values:
        call(value)


def step(optimizer: Any) -> None:
    optimizer.step()


def step_again(last: int, trainer: pl.Trainer, *_: Any) -> None:
    trainer.optimizers[0].step()


def helper(module: pl.LightningModule) -> None:
    pass


def trainer(module: pl.LightningModule, *callbacks: pl.Callback, clip: float | None = 1.0, by: Any = None) -> Any:
    return SimpleNamespace(
        lightning_module=module, callbacks=list(callbacks), gradient_clip_val=clip, gradient_clip_algorithm=by
    )


def by_instance() -> pl.LightningModule:
    module = Plain()
    module.on_after_backward = lambda: None  # type: ignore[method-assign]
    return module


def test_a_compiled_call_of_an_earlier_training_is_no_reader() -> None:
    module = Plain()
    module._compiled_call_impl = may_read_gradients
    assert not may_read_gradients(trainer(module))


def test_lightning_and_code_without_gradients_read_none() -> None:
    lightning = ModelCheckpoint(), LearningRateMonitor(), WeightAveraging()
    assert not may_read_gradients(trainer(Plain(), Counts(), *lightning))
    assert not may_read_gradients(trainer(StepOfItsOwn(), Profiles()))
    assert not may_read_gradients(trainer(Plain(), clip=None, by="value"))


@pytest.mark.parametrize(
    "reads",
    [
        trainer(Helper()),
        trainer(Later()),
        trainer(ByName()),
        trainer(by_instance()),
        trainer(Plain(), Logs()),
        trainer(Plain(), StepsAgain()),
        trainer(Plain(), StepsByName()),
        trainer(Plain(), StepsInside()),
        trainer(Plain(), StepsScheduledOptimizer()),
        trainer(Plain(), StepsEither()),
        trainer(Plain(), StepsByString()),
        trainer(Plain(), StepsByFunction()),
        trainer(Plain(), StepsByAttribute()),
        trainer(Plain(), LambdaCallback(on_train_batch_end=partial(step_again, 1))),
        trainer(Plain(), by="value"),
    ],
)
def test_code_that_may_see_a_gradient_is_found(reads: Any) -> None:
    assert may_read_gradients(reads)
