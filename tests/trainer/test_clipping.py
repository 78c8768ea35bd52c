"""Clip gradients by the norm over all ranks through Lightning's own path, also within a captured step."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from lightning_zero.step.stepper import OptimizerStepper
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    HIDDEN,
    RTOL,
    WIDTH,
    Regression,
    check_captured,
    close,
    global_losses,
    is_ours,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

NORM, VALUE = 0.15, 0.02  # both below the gradients' values


class Clipped(Regression):
    """Has frozen and unused parameters; records the gradients' norm and maximum before and after clipping."""

    def __init__(self, fused: bool = False, sgd: bool = False) -> None:
        super().__init__()
        self.net[2].weight.requires_grad_(False)
        with seeded(1):
            self.unused = nn.Linear(WIDTH, HIDDEN)
        self.fused, self.sgd = fused, sgd
        self.before: list[tuple[float, float]] = []
        self.after: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        if self.sgd:
            return torch.optim.SGD(params, lr=0.5)
        # an epsilon that matters, or Adam would forget the gradients' scale
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-2, fused=self.fused)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients(*args, **kwargs)
        self.after.append(self.measure())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before.append(self.measure())

    def measure(self) -> tuple[float, float]:
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        largest = torch.stack([grad.abs().max() for grad in grads]).max()
        return math.sqrt(squares.item()), largest.item()


class ClippedByTheStep(Clipped):
    """Overrides nothing about clipping, so that the step may clip; records the gradients after that."""

    clip_gradients = pl.LightningModule.clip_gradients

    def on_train_batch_end(self, *args: Any) -> None:
        self.after.append(self.measure())


class ClipsItself(Clipped):
    """Looser for the first step, then by value, then not at all but halved."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.global_step == 0:
            self.clip_gradients(optimizer, 2 * NORM, "norm")
        elif self.global_step == 1:
            self.clip_gradients(optimizer, VALUE, "value")
        else:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
            self.after.append(self.measure())


def _note_norms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the value that the strategy's own clipping returns."""
    returned: list[float] = []
    original = OptimizerStepper.clip_norm

    def clip_norm(stepper: OptimizerStepper, *args: Any, **kwargs: Any) -> Tensor:
        norm = original(stepper, *args, **kwargs)
        returned.append(norm.item())
        return norm

    monkeypatch.setattr(OptimizerStepper, "clip_norm", clip_norm)
    return returned


def _clip(
    kind: str, kwargs: dict[str, Any], arguments: dict[str, Any], make: type[Clipped] = Clipped
) -> dict[str, Any]:
    module, trainer = make(**kwargs), make_trainer(kind, **arguments)
    with pytest.MonkeyPatch.context() as monkeypatch:
        norms = _note_norms(monkeypatch)
        # five batches: with accumulation the last window is a partial one
        trainer.fit(module, make_loader(kind, 5))
    check_captured(trainer)
    if kind.endswith("captured"):
        stepper = engine_of(module).optimizers.stepper(module.optimizers().optimizer)
        kernel = stepper.runner.kernel(stepper.layout)
        clips = {variant[0] for variant in kernel._sequences}
        assert clips == {make is ClippedByTheStep}, "clipped where it should not be"
    state = whole_state(module)
    losses = global_losses(kind, module)
    close(module)
    return {
        "losses": losses,
        "state": state,
        "before": module.before,
        "after": module.after,
        "returned": norms if is_ours(kind) else [norm for norm, _ in module.before],
    }


def _clip_under(*calls: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [_clip(*call) for call in calls]


def _assert_clipped(reference: dict[str, Any], algorithm: str) -> None:
    """The gradients of the reference were larger, and none is afterwards."""
    which, limit = (0, NORM) if algorithm == "norm" else (1, VALUE)
    assert any(values[which] > 1.5 * limit for values in reference["before"])
    assert all(values[which] <= limit * 1.001 for values in reference["after"])


MIXED = {"precision": "bf16-mixed"}
CASES = {
    "norm": ({}, {"gradient_clip_val": NORM}),
    "norm, SGD": ({"sgd": True}, {"gradient_clip_val": NORM}),
    "value": ({"sgd": True}, {"gradient_clip_val": VALUE, "gradient_clip_algorithm": "value"}),
    "norm, accumulated": ({"sgd": True}, {"gradient_clip_val": NORM, "accumulate_grad_batches": 2}),
    "value, accumulated": (
        {},
        {"gradient_clip_val": VALUE, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ),
    "norm, fused": ({"fused": True}, {"gradient_clip_val": NORM}),
    "norm, fused, bf16-mixed": ({"fused": True}, {"gradient_clip_val": NORM} | MIXED),
    "value, fused, bf16-mixed": (
        {"fused": True},
        {"gradient_clip_val": VALUE, "gradient_clip_algorithm": "value"} | MIXED,
    ),
    "norm, accumulated, bf16-mixed": ({}, {"gradient_clip_val": NORM, "accumulate_grad_batches": 2} | MIXED),
}


@pytest.mark.parametrize(
    ("world_size", "kind", "case"),
    [(2, "eager", case) for case in CASES]
    + [(3, "eager", case) for case in ("norm, SGD", "value, accumulated")]
    + [
        (2, "captured", case)
        for case in ("norm", "norm, accumulated", "value, accumulated", "value, fused, bf16-mixed")
    ]
    + [(2, "compiled", "norm, fused, bf16-mixed")],
)
def test_clipping_equals_ddps(ranks: Ranks, world_size: int, kind: str, case: str) -> None:
    _compare(ranks, world_size, kind, case, Clipped)


@pytest.mark.parametrize(
    ("world_size", "kind", "case"),
    [(2, "captured", case) for case in ("norm", "norm, SGD", "norm, fused, bf16-mixed")]
    + [(3, "captured", "norm, fused"), (2, "compiled, captured", "norm, fused, bf16-mixed"), (2, "eager", "norm")],
)
def test_clipping_that_is_left_to_the_step_equals_ddps(ranks: Ranks, world_size: int, kind: str, case: str) -> None:
    _compare(ranks, world_size, kind, case, ClippedByTheStep)


def _compare(ranks: Ranks, world_size: int, kind: str, case: str, make: type[Clipped]) -> None:
    kwargs, arguments = CASES[case]
    mixed = "precision" in arguments
    # Lightning 2.6.6 refuses to clip for a fused optimizer under mixed precision; unfused AdamW computes the same.
    reference = ("ddp", kwargs | ({"fused": False} if mixed else {}), arguments, make)
    # gradients travel in float32, as DDP's do, so that nothing else differs
    calls = [reference, (kind, kwargs, arguments | {"reduce_dtype": "32"}, make)]
    rtol = 1e-5 if mixed else RTOL
    for ddp, ours in ranks.run(world_size, _clip_under, *calls):
        _assert_clipped(ddp, arguments.get("gradient_clip_algorithm", "norm"))
        by_value = arguments.get("gradient_clip_algorithm") == "value"
        assert ours.pop("returned") == pytest.approx([] if by_value else ddp["returned"], rel=rtol)
        ddp.pop("returned")
        assert_close_relative(ours, ddp, rtol, what=case)


def test_norm_of_gradients_that_travel_in_bf16_is_near_ddps(ranks: Ranks) -> None:
    arguments = {"gradient_clip_val": NORM} | MIXED
    for ddp, ours in ranks.run(2, _clip_under, ("ddp", {}, arguments), ("eager", {}, arguments)):
        assert ours["returned"] == pytest.approx(ddp["returned"], rel=1e-2)
        assert [norm for norm, _ in ours["after"]] == pytest.approx([NORM] * 5, rel=1e-3)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "eager"), (3, "eager"), (2, "captured")])
def test_overridden_configure_gradient_clipping_decides(ranks: Ranks, world_size: int, kind: str) -> None:
    calls = [(name, {"sgd": True}, {}, ClipsItself) for name in ("ddp", kind)]
    for ddp, ours in ranks.run(world_size, _clip_under, *calls):
        (first, _), (_, second), *others = ddp["after"]
        assert first == pytest.approx(2 * NORM, rel=1e-4)
        assert second == pytest.approx(VALUE)
        assert [norm for norm, _ in others] == pytest.approx([norm / 2 for norm, _ in ddp["before"][2:]])
        for key in ("losses", "state", "before", "after"):
            assert_close_relative(ours[key], ddp[key], RTOL, what=key)
