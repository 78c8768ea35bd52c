"""Count a rank whose loss reaches no weight as zero, as one process does with the mean of the losses."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks
from tests.ranks.report import RankFailure

STEPS = 8
# Ranks whose loss reaches no weight, by step. Two steps show all ranks the gathers of fully compiled steps.
LACKING = {3: {1}, 4: {0}, 6: {0, 1, 2}, 7: {2}}
WAYS = ["constant", "forward only", "none", "times zero"]


class Lacking(Regression):
    """In each step, takes the mean of the losses of as many ranks as a single process stands for."""

    def __init__(self, how: str, stands_for: int, lacking: dict[int, set[int]]) -> None:
        super().__init__()
        self.how, self.stands_for, self.lacking = how, stands_for, lacking

    def _loss(self, batch: Any, rank: int, step: int) -> Tensor | None:
        if rank not in self.lacking.get(step, ()):
            return self.loss(batch)
        if self.how == "times zero":
            return self.loss(batch) * 0
        if self.how == "forward only":
            self.loss(batch)
        return None if self.how == "none" else torch.zeros((), requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.stands_for == 1:
            return self._loss(batch, self.global_rank, batch_idx)
        parts = [[value[rank :: self.stands_for] for value in batch] for rank in range(self.stands_for)]
        losses = [self._loss(part, rank, batch_idx) for rank, part in enumerate(parts)]
        found = [loss for loss in losses if loss is not None]
        return sum(found) / self.stands_for if found else None


class ByHand(Lacking):
    """Use manual optimization with an optimizer step in each training step, clipped."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if loss is not None:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2)
        optimizer.step()


def fit(kind: str, world: int, how: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    arguments = dict(arguments)
    make = arguments.pop("make", Lacking)
    lacking = arguments.pop("lacking", LACKING)
    if arguments.pop("scaled", False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        arguments["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    module = make(how, world if kind == "single" else 1, lacking)
    if kind == "single":
        arguments = {key: value for key, value in arguments.items() if not key.endswith(("_transport", "stage"))}
    trainer = make_trainer(kind, **arguments)
    trainer.fit(module, make_loader(kind, STEPS))
    state = whole_state(module)
    close(module)
    return state


def fit_all(kinds: list[str], world: int, cases: list[tuple[str, dict[str, Any]]]) -> list[list[dict[str, Tensor]]]:
    results = [[fit(kind, world, how, arguments) for kind in ["single", *kinds]] for how, arguments in cases]
    torch._dynamo.reset()
    return results


def check(ranks: Ranks, world: int, kinds: list[str], cases: list[tuple[str, dict[str, Any]]], rtol: float) -> None:
    for results in ranks.run(world, fit_all, kinds, world, cases, deadline=300):
        for (how, arguments), (expected, *all_ours) in zip(cases, results, strict=True):
            for kind, ours in zip(kinds, all_ours, strict=True):
                assert_close_relative(ours, expected, rtol, what=f"{kind}, {how}, {arguments}: weights")


@pytest.mark.parametrize(
    ("world", "transport"), [(2, {}), (2, {"gather_transport": "collective"}), (3, {"gather_transport": "collective"})]
)
@pytest.mark.exhaustive_variants("2-transport1", "3-transport2")
def test_a_rank_without_gradients_counts_as_zero(ranks: Ranks, world: int, transport: dict[str, Any]) -> None:
    kinds = ["compiled", "eager", *([] if transport else ["captured"])]
    check(ranks, world, kinds, [(how, transport) for how in WAYS], RTOL)


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
OPTIONS = [
    ACCUMULATED,
    ACCUMULATED | {"stage": 1},
    ACCUMULATED | {"gather_transport": "collective"},
    {"stage": 2, "gradient_clip_val": 0.2},
    {"make": ByHand},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.exhaustive_variants("*stage*", "*collective*")
def test_it_does_so_with_other_options(ranks: Ranks, options: dict[str, Any]) -> None:
    check(ranks, 2, ["compiled", "eager"], [(how, options) for how in ("none", "constant")], RTOL)


def _by_hand(how: str) -> None:
    fit("eager", 1, how, {"make": ByHand, "gather_transport": "collective", "lacking": {3: {1}}})


def test_the_error_about_a_rank_without_a_forward_by_hand_says_what_to_write(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"(?s)RankMismatchError.*self\.manual_backward\(0 \* loss\)"):
        ranks.run(2, _by_hand, "none", last=True)


@pytest.mark.exhaustive  # test_precision.py scales losses
def test_it_does_so_with_a_scaled_loss(ranks: Ranks) -> None:
    options = {"scaled": True, "gradient_clip_val": 0.2}
    # A single process cannot unscale gradients that are not there, if its loss is a constant.
    check(ranks, 2, ["eager", "captured"], [("none", options)], 1e-3)
    some = options | {"lacking": {step: lacking for step, lacking in LACKING.items() if len(lacking) == 1}}
    check(ranks, 2, ["eager", "captured"], [("constant", some), ("times zero", some)], 1e-3)
