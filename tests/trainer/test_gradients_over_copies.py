"""Gradients over compute copies through the Trainer: hooks see them until the step, evaluations and checkpoints come in
between, and trainings of several micro-batches for one step are refused before any."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import Regression, close, make_loader, make_strategy, make_trainer, whole_state
from tests.ranks.pool import RankFailure, Ranks

BF16 = torch.bfloat16


class Looks(Regression):
    """Rounds gradients, as those over copies are, and remembers what hooks see of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.after: list[bool] = []
        self.evaluated: list[float] = []

    def on_after_backward(self) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.copy_(param.grad.to(BF16))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(any(param.grad is not None for param in self.parameters()))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.evaluated.append(loss.item())
        return loss


def fit(over: bool, kind: str, resumed: bool) -> tuple[dict[str, Any], Looks]:
    model = Looks()
    chosen = {"gradients_over_copies": True} if over else {}
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 2, "val_check_interval": 3}

    def trainer(**more: Any) -> pl.Trainer:
        return make_trainer(kind, strategy=make_strategy(kind, **chosen), **options | more)

    trainer().fit(model, make_loader(kind, 8), make_loader(kind, 2, seed=1))
    if resumed:
        path = f"{over}.ckpt"
        assert model.trainer is not None
        model.trainer.save_checkpoint(path)
        trainer(max_epochs=3).fit(model, make_loader(kind, 8), make_loader(kind, 2, seed=1), ckpt_path=path)
    state = whole_state(model)
    close(model)
    torch._dynamo.reset()
    return state, model


def fit_both(kind: str, resumed: bool) -> tuple[Any, ...]:
    (over, looked), (plain, expected) = (fit(over, kind, resumed) for over in (True, False))
    same = [(one.losses, one.norms, one.evaluated) for one in (looked, expected)]
    return over, plain, same, (looked.after, expected.after)


@pytest.mark.parametrize(("kind", "resumed"), [("compiled", False), ("compiled, captured", True)])
def test_a_training_is_what_it_is_with_rounded_gradients(ranks: Ranks, kind: str, resumed: bool) -> None:
    for over, plain, (found, expected), (after, kept) in ranks.run(2, fit_both, kind, resumed, deadline=120):
        assert_close_relative(over, plain, 1e-6, what="weights")
        for what, one, other in zip(("losses", "norms", "evaluations"), found, expected, strict=True):
            assert len(one) >= 8
            assert_close_relative(one, other, 4e-3 if what == "norms" else 1e-6, what=what)  # of bfloat16
        assert not any(after), "gradients are there behind the step"
        assert all(kept)


def accumulate() -> None:
    strategy = make_strategy("compiled", gradients_over_copies=True)
    trainer = make_trainer("compiled", strategy=strategy, precision="bf16-mixed", accumulate_grad_batches=2)
    trainer.fit(Looks(), make_loader("compiled", 4))


def full_precision() -> None:
    strategy = make_strategy("compiled", gradients_over_copies=True)
    make_trainer("compiled", strategy=strategy).fit(Looks(), make_loader("compiled", 4))


@pytest.mark.parametrize(
    ("train", "says"),
    [(accumulate, "train without accumulate_grad_batches"), (full_precision, "this training computes in float32")],
)
def test_what_cannot_be_is_refused_with_what_to_do(ranks: Ranks, train: Any, says: str) -> None:
    with pytest.raises(RankFailure, match=says):
        ranks.run(2, train)
