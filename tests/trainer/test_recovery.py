"""Train the same module again after a failed fit, as if it had not failed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, global_losses, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


class Planned(Exception): ...


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planned("in backward")


class _Layer(nn.Module):
    """Returns its input, or fails in the middle of the model."""

    fails = ""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise Planned("in forward")
        return _FailsInBackward.apply(x) if self.fails == "backward" else x


class Failing(Regression):
    """Fails at a given place in the second step, with pending gradients of an earlier batch."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.net.insert(2, _Layer())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[2].fails = self.place if batch_idx == 1 else ""
        if self.net[2].fails == "read":
            held = self.net[0].weight  # a gathered weight without any use
            raise Planned(f"in a step that read {tuple(held.shape)}")
        loss = super().training_step(batch, batch_idx)
        if self.net[2].fails == "step":
            raise Planned("in step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.net[2].fails == "optimizer":
            raise Planned("before the optimizer's step")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.place == "validation":
            raise Planned("in validation")
        super().validation_step(batch, batch_idx)


PLACES = ["forward", "backward", "step", "read", "optimizer", "validation"]


def _fit(kind: str, module: Failing) -> None:
    trainer = make_trainer(kind, accumulate_grad_batches=2 if module.place != "optimizer" else 1)
    trainer.fit(module, make_loader(kind), make_loader(kind, 1))


def _fail_and_fit(kind: str, place: str) -> dict[str, Any]:
    module = Failing(place)
    with pytest.raises(Planned):
        _fit(kind, module)
    left: dict[str, Any] = {}
    engine = engine_of(module)
    if engine is not None:
        counters = engine.executor.counters()
        left = {key: counters[key] for key in ("watched_weights", "bucket_bytes")}
    module.place = ""
    module.losses.clear()
    _fit(kind, module)
    out = {"losses": global_losses(kind, module), "state": whole_state(module), "left": left}
    close(module)
    return out


def _fail_under(kind: str) -> dict[str, Any]:
    places = ["forward", "backward"] if kind == "compiled" else PLACES  # elsewhere nothing that is compiled has run
    return {place: (_fail_and_fit("single", place), _fail_and_fit(kind, place)) for place in places}


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(1, "eager"), (2, "eager"), pytest.param(2, "compiled", marks=pytest.mark.slow)],
)
@pytest.mark.exhaustive_variants("2-compiled")
def test_fit_after_an_exception_equals_a_single_devices(ranks: Ranks, world_size: int, kind: str) -> None:
    for results in ranks.run(world_size, _fail_under, kind, deadline=120):
        for place, (single, ours) in results.items():
            assert ours.pop("left") == {"watched_weights": 0, "bucket_bytes": 0}, place
            single.pop("left")
            assert_close_relative(ours, single, 5 * RTOL, what=f"after failing in {place}: ")
