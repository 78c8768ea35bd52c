"""Norms of gradients, logged as under DDP: by Lightning's function inside its hooks, by ours anywhere."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

import lightning_zero
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    HIDDEN,
    INPUTS,
    RTOL,
    WIDTH,
    Regression,
    check_captured,
    close,
    make_loader,
    make_trainer,
    seeded,
    train,
)
from tests.ranks.pool import Ranks

TYPES: list[Any] = [1, 2, "3.5", "inf"]


class Normed(Regression):
    """Logs norms of all types in all hooks for gradients; parameters are frozen, unused, or tied."""

    def __init__(self, ours: bool = False) -> None:
        super().__init__()
        self.grad_norm = lightning_zero.grad_norm if ours else grad_norm
        self.net[2].weight.requires_grad_(False)
        with seeded(1):
            self.unused = nn.Linear(WIDTH, HIDDEN)
        self.alias = nn.Linear(INPUTS, WIDTH)
        self.alias.weight = self.net[0].weight
        self.seen: list[dict[str, float]] = []

    def note(self, module: nn.Module, *types: Any) -> None:
        self.seen += [{k: float(v) for k, v in self.grad_norm(module, norm_type=p).items()} for p in types]

    def on_after_backward(self) -> None:
        self.note(self, 2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(self.grad_norm(self, norm_type=2))
        self.note(self, *TYPES)
        self.note(self.net[4], 2)  # a part of the module
        if self.trainer.global_step == 1:
            next(self.net[4].parameters()).grad.mul_(3)  # which later norms must see
            self.note(self.net[4], 2, "inf")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.15, "norm")
        self.note(self, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2)


class Manual(Normed):
    def __init__(self, ours: bool = False) -> None:
        super().__init__(ours)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.grad_norm is lightning_zero.grad_norm:  # there is no hook here
            self.note(self, 2)
        optimizer.step()


class Monitor(pl.Callback):
    """Callbacks look at gradients, too."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        module.note(module, 2)


def _normed(kind: str, make: Any, ours: bool, **arguments: Any) -> tuple[list[dict[str, float]], dict[str, float]]:
    module, trainer = make(ours), make_trainer(kind, callbacks=[Monitor()], **arguments)
    trainer.fit(module, make_loader(kind, 3))
    check_captured(trainer)
    close(module)
    return module.seen, {key: float(value) for key, value in trainer.logged_metrics.items()}


def _normed_under(kinds: list[str], make: Any = Normed, ours: bool = False, **arguments: Any) -> dict[str, Any]:
    return {kind: _normed(kind, make, ours, **arguments) for kind in kinds}


@pytest.mark.parametrize(
    ("ours", "kind"), [(False, "captured"), (False, "compiled"), (True, "eager"), (True, "captured")]
)
def test_logged_norms_equal_ddps(ranks: Ranks, kind: str, ours: bool) -> None:
    for result in ranks.run(2, _normed_under, ["ddp", kind], ours=ours):
        (seen, logged), (expected, expected_logged) = result[kind], result["ddp"]
        assert len(expected) == 3 * 8 + 2
        assert len(expected_logged) == 6, "five parameters with gradients, and the total"
        assert list(map(list, seen)) == list(map(list, expected))
        assert_close_relative(seen, expected, 3 * RTOL)
        assert_close_relative(logged, expected_logged, 3 * RTOL)


@pytest.mark.parametrize(
    ("precision", "options", "rtol"),
    [
        # gradients travel in float32, as DDP's do, so that nothing else differs
        ("bf16-mixed", {"reduce_dtype": "32"}, 3 * RTOL),
        ("16-mixed", {"reduce_dtype": "32"}, 3 * RTOL),
        ("bf16-true", {}, 3 * RTOL),
        ("bf16-mixed", {}, 1e-2),
    ],
)
def test_norms_in_other_precisions(ranks: Ranks, precision: Any, options: dict[str, Any], rtol: float) -> None:
    for result in ranks.run(2, _normed_under, ["ddp", "eager"], precision=precision, **options):
        (seen, logged), (expected, expected_logged) = result["eager"], result["ddp"]
        assert list(map(list, seen)) == list(map(list, expected))
        assert_close_relative(seen, expected, rtol)
        assert_close_relative(logged, expected_logged, rtol)


@pytest.mark.parametrize("ours", [False, True], ids=["Lightning's", "ours"])
def test_norms_in_manual_optimization(ranks: Ranks, ours: bool) -> None:
    for result in ranks.run(2, _normed_under, ["ddp", "captured"], Manual, ours):
        assert_close_relative(result["captured"], result["ddp"], 3 * RTOL)


class Taken(Regression):
    """Takes norms of gradients by other functions, and calls a compiled module where they are looked at."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        with torch.no_grad():
            self(torch.ones(2, INPUTS))
        self.losses += [
            float(torch.linalg.vector_norm(torch.ones(3))),  # of something else
            float(grads[2].detach().norm()),
            float(torch.linalg.vector_norm(grads[1])),
            float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)),
        ]


def _taken(kinds: list[str]) -> dict[str, Any]:
    return {kind: train(kind, Taken, steps=3, gradient_clip_val=0.1) for kind in kinds}


@pytest.mark.parametrize("kind", ["captured", "compiled"])
def test_norms_by_any_function_equal_ddps(ranks: Ranks, kind: str) -> None:
    for result in ranks.run(2, _taken, ["ddp", kind]):
        assert_close_relative(result[kind], result["ddp"], 3 * RTOL)


def _not_sharded() -> tuple[dict[str, Any], dict[str, Any]]:
    with seeded():
        module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    return lightning_zero.grad_norm(module, "inf", "."), grad_norm(module, "inf", ".")


def test_ours_leaves_a_plain_module_to_lightnings() -> None:
    ours, lightnings = _not_sharded()
    assert ours == lightnings
