"""Alias gradients with compute shards through the Trainer.

Hooks see the gradients until the step, evaluations and checkpoints happen in between, and trainings of several micro-
batches per step are refused.
"""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_zero.memory_planner.inputs import MemoryConfig
from lightning_zero.sharding.param_record import Role
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import Regression, close, make_loader, make_strategy, make_trainer, whole_state
from tests.ranks.pool import RankFailure, Ranks

BF16 = torch.bfloat16
OVER = "grad_aliasing"


class Looks(Regression):
    """Rounds gradients to bfloat16, as aliased ones are, and records them in hooks."""

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


def fit(chosen: dict[str, Any], kind: str, resumed: bool) -> tuple[dict[str, Any], Looks, Any]:
    """Weights, the model, and the last plan."""
    model = Looks()
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 2, "val_check_interval": 3}

    def trainer(**more: Any) -> pl.Trainer:
        return make_trainer(kind, strategy=make_strategy(kind, **chosen), **options | more)

    trainer().fit(model, make_loader(kind, 8), make_loader(kind, 2, seed=1))
    if resumed:
        path = f"{len(chosen)}.ckpt"
        assert model.trainer is not None
        model.trainer.save_checkpoint(path)
        trainer(max_epochs=3).fit(model, make_loader(kind, 8), make_loader(kind, 2, seed=1), ckpt_path=path)
    state, plan = whole_state(model), model.trainer.strategy.memory_plan  # type: ignore[union-attr]
    close(model)
    torch._dynamo.reset()
    return state, model, plan


def fit_both(kind: str, resumed: bool, by_plan: bool) -> tuple[Any, ...]:
    plain, expected, plan = fit({"memory": 1.0} if by_plan else {}, kind, resumed)  # which is more than enough
    chosen = {"memory": (plan.peak - 1) / 2**30} if by_plan else {"grad_aliasing": True}
    over, looked, plan = fit(chosen, kind, resumed)
    same = [(one.losses, one.norms, one.evaluated) for one in (looked, expected)]
    return over, plain, same, (looked.after, expected.after), plan


@pytest.mark.parametrize(
    ("kind", "resumed", "by_plan"),
    [("compiled", False, False), ("compiled, captured", True, False), ("compiled", True, True)],
)
@pytest.mark.exhaustive_variants("compiled-True-True", "compiled-False-False")
def test_a_training_is_what_it_is_with_rounded_gradients(ranks: Ranks, kind: str, resumed: bool, by_plan: bool) -> None:
    for over, plain, (found, expected), (after, kept), plan in ranks.run(
        2, fit_both, kind, resumed, by_plan, deadline=120
    ):
        if by_plan:
            assert plan.fits
            assert plan.chosen == MemoryConfig(grad_aliasing=True)
        assert_close_relative(over, plain, 1e-6, what="weights")
        for what, one, other in zip(("losses", "norms", "evaluations"), found, expected, strict=True):
            assert len(one) >= 8
            assert_close_relative(one, other, 4e-3 if what == "norms" else 1e-6, what=what)  # of bfloat16
        assert not any(after), "gradients are there behind the step"
        assert all(kept)


def accumulate() -> None:
    strategy = make_strategy("compiled", grad_aliasing=True)
    trainer = make_trainer("compiled", strategy=strategy, precision="bf16-mixed", accumulate_grad_batches=2)
    trainer.fit(Looks(), make_loader("compiled", 4))


def full_precision() -> None:
    strategy = make_strategy("compiled", grad_aliasing=True)
    make_trainer("compiled", strategy=strategy).fit(Looks(), make_loader("compiled", 4))


@pytest.mark.parametrize(
    ("train", "says"),
    [(accumulate, "train without accumulate_grad_batches"), (full_precision, "this training computes in float32")],
)
def test_what_cannot_be_is_refused_with_what_to_do(ranks: Ranks, train: Any, says: str) -> None:
    with pytest.raises(RankFailure, match=says):
        ranks.run(2, train)


def one_after_another(*later: dict[str, Any]) -> list[tuple[bool, set[Any]]]:
    """Return the place of gradients with plenty of memory, and after a training with too little."""
    model, found, limit = Looks(), [], 1.0
    for more in ({}, {}, *later):
        strategy = make_strategy("compiled", memory=limit, **{k: v for k, v in more.items() if k in OVER})
        options = {k: v for k, v in more.items() if k not in OVER}
        trainer = make_trainer("compiled", strategy=strategy, precision="bf16-mixed", max_epochs=1, **options)
        trainer.fit(model, make_loader("compiled", 4))
        memory = strategy._require_engine().sharder.memory
        found.append((memory.alias_gradients, {gradient.dtype for gradient in memory.tensors(Role.GRADIENT)}))
        if limit == 1.0:
            close(model)
            torch._dynamo.reset()
            model, limit = Looks(), (strategy.memory_plan.peak - 1) / 2**30
    close(model)
    return found


@pytest.mark.parametrize("later", [{"accumulate_grad_batches": 2}, {OVER: False}])
def test_what_a_plan_has_chosen_is_undone_for_a_later_training_that_cannot_or_may_not_have_it(
    ranks: Ranks, later: dict[str, Any]
) -> None:
    apart, over = (False, {torch.float32}), (True, {BF16})
    for found in ranks.run(1, one_after_another, {}, later, deadline=120):
        assert found == [apart, over, over, apart]


def goes_on(batches: int) -> list[bool]:
    """Accumulates from the second half of its batches on, which cannot be known before."""
    found: list[bool] = []

    class Changes(Looks):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            found.append(self.trainer.strategy._require_engine().sharder.memory.alias_gradients)
            if index == batches // 2 and limit < 1:
                self.trainer.accumulate_grad_batches = 2

    limit = 1.0
    for _ in range(2):
        model, strategy = Changes(), make_strategy("compiled", memory=limit)
        trainer = make_trainer("compiled", strategy=strategy, precision="bf16-mixed", max_epochs=1)
        trainer.fit(model, make_loader("compiled", batches))
        limit = (strategy.memory_plan.peak - 1) / 2**30
        close(model)
        torch._dynamo.reset()
    return found[batches:]


def test_micro_batches_that_nobody_could_know_of_are_trained_with(ranks: Ranks) -> None:
    for found in ranks.run(2, goes_on, 8, deadline=120):
        assert found == [True] * 5 + [False] * 3


def by_default(kind: str) -> list[Any]:
    """Return for options of one rank: if gradients alias copies, their dtypes, and the losses."""
    found = []
    fp8 = {"linear_dtype": "fp8", "fp8_shards": True}
    for chosen in ({}, {OVER: False}, {"reduce_dtype": "32"}, fp8):
        torch._dynamo.reset()
        model, strategy = Regression(), make_strategy(kind, **chosen)
        trainer = make_trainer(
            kind, strategy=strategy, precision="bf16-mixed", max_epochs=1, gradient_clip_val=0.5, limit_val_batches=2
        )
        trainer.fit(model, make_loader(kind, 12), make_loader(kind, 2, seed=1))
        memory = strategy._require_engine().sharder.memory
        dtypes = {gradient.dtype for gradient in memory.tensors(Role.GRADIENT)}
        found.append((memory.alias_gradients, dtypes, model.losses))
        if not chosen:  # of later trainings of the same model, the second accumulates
            for batches in (1, 2):
                later = make_strategy(kind)
                options = {"precision": "bf16-mixed", "max_epochs": 1, "accumulate_grad_batches": batches}
                make_trainer(kind, strategy=later, **options).fit(model, make_loader(kind, 4))
                found.append((later._require_engine().sharder.memory.alias_gradients, set(), []))
        close(model)
    return found


@pytest.mark.parametrize("kind", ["compiled", "compiled, captured"])
def test_one_rank_aliases_gradients_that_nobody_reads(ranks: Ranks, kind: str) -> None:
    ((over, again, later, apart, exact, fp8),) = ranks.run(1, by_default, kind, deadline=120)
    assert over[:2] == (True, {BF16})
    assert again[0]
    assert not later[0]
    assert apart[:2] == exact[:2] == fp8[:2] == (False, {torch.float32})
    assert len(over[2]) >= 12
    assert_close_relative(over[2][:12], apart[2], 2e-3, what="losses")
    assert over[2][0] == apart[2][0]


def is_aliased(trainer: Any) -> bool:
    return trainer.strategy._require_engine().sharder.memory.alias_gradients


def fit_by_default_and_without(make: Any, kind: str, batches: int) -> list[Any]:
    found = []
    for chosen in ({}, {OVER: False}):
        torch._dynamo.reset()
        model, strategy = make(), make_strategy(kind, **chosen)
        trainer = make_trainer(kind, strategy=strategy, precision="bf16-mixed", max_epochs=1)
        trainer.fit(model, make_loader(kind, batches))
        found.append((model.aliased, model.losses, whole_state(model)))
        close(model)
    return found


def accumulates_later(kind: str, batches: int, when: str) -> list[Any]:
    """Return for the default and without aliasing: where gradients alias copies, losses, and weights."""

    class Changes(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.aliased: list[bool] = []

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.aliased.append(is_aliased(self.trainer))
            self.change(when == "start" and index == batches // 2)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.change(when == "end" and index == batches // 2 - 1)

        def change(self, now: bool) -> None:
            if now:
                assert self.trainer is not None
                self.trainer.accumulate_grad_batches = 2

    return fit_by_default_and_without(Changes, kind, batches)


@pytest.mark.parametrize(("kind", "when"), [("compiled", "start"), ("compiled, captured", "end")])
def test_one_rank_stops_aliasing_if_micro_batches_follow(ranks: Ranks, kind: str, when: str) -> None:
    ((found, expected),) = ranks.run(1, accumulates_later, kind, 12, when, deadline=120)
    assert found[0] == [True] * 7 + [False] * 5
    assert not any(expected[0])
    assert_close_relative(found[1], expected[1], 1e-6, what="losses")
    assert_close_relative(found[2], expected[2], 1e-6, what="weights")


def use_twice(kind: str, batches: int) -> list[Any]:
    """Return for the default and without aliasing: where gradients alias copies, losses, and weights."""

    class Twice(Regression):
        """Calls its network for two halves of a batch."""

        def __init__(self) -> None:
            super().__init__()
            self.aliased: list[bool] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.aliased.append(is_aliased(self.trainer))
            halves = zip(*(part.chunk(2) for part in batch), strict=True)
            loss = torch.stack([self.loss(half) for half in halves]).mean()
            self.losses.append(loss.item())
            return loss

    return fit_by_default_and_without(Twice, kind, batches)


@pytest.mark.parametrize("kind", ["compiled", "compiled, captured"])
def test_one_rank_stops_aliasing_if_weights_are_used_after_their_gradient(ranks: Ranks, kind: str) -> None:
    ((found, expected),) = ranks.run(1, use_twice, kind, 12, deadline=120)
    assert found[0][0]
    assert not any(found[0][4:]), found[0]
    assert_close_relative(found[1], expected[1], 2e-3, what="losses")
    assert_close_relative(found[2], expected[2], 2e-2, atol=1e-3, what="weights")


def present(params: Any) -> list[bool]:
    return [param.grad is not None for param in params]


def warnings_about_readers(reads: bool, options: dict[str, Any]) -> tuple[list[str], list[bool]]:
    found: list[bool] = []

    class Reads(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if reads:
                found.extend(present(self.parameters()))

    model = Reads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = make_strategy("compiled", **options)
        trainer = make_trainer("compiled", strategy=strategy, precision="bf16-mixed", max_epochs=1)
        trainer.fit(model, make_loader("compiled", 4))
    close(model)
    return [str(one.message) for one in caught if "after the optimizer step" in str(one.message)], found


@pytest.mark.parametrize("options", [{}, {OVER: True}], ids=["automatic", "by option"])
def test_code_that_finds_no_gradients_after_the_step_is_warned_once(ranks: Ranks, options: dict[str, Any]) -> None:
    ((messages, found),) = ranks.run(1, warnings_about_readers, True, options, deadline=120)
    assert found
    assert not any(found)
    assert len(messages) == 1
    assert "Tuning(grad_aliasing=False)" in messages[0]
    assert ranks.run(1, warnings_about_readers, False, options, deadline=120) == [([], [])]
