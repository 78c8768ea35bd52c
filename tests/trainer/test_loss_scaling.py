"""Skip a step on all ranks after an overflow on one (16-mixed), decided on the host or on the device."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_zero.engine import engine_of
from tests.helpers.lightning_modules import OVERFLOW, Overflows
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import check_captured, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


class NotANumber(Overflows):
    overflow = (1, 7, torch.nan)


def fit_with_scaler(kind: str, make: Any = Overflows, **options: Any) -> dict[str, Any]:
    module = make()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
    trainer = make_trainer(kind, plugins=[plugin], gradient_clip_val=0.2, **options)
    trainer.fit(module, make_loader(kind, 8))
    check_captured(trainer)
    state = whole_state(module)
    engine = engine_of(module)
    skips = engine.optimizers.stepper(module.optimizers().optimizer).may_skip() if engine is not None else None
    close(module)
    return {"state": state, "scales": module.scales, "steps": module.steps, "device decides": skips}


def fit_both(kind: str, make: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [fit_with_scaler("ddp", make), fit_with_scaler(kind, make, **options)]


REPLICAS = {"ranks_per_host": 1, "replicate_over": "hosts"}


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        ("eager", NotANumber, {}),
        ("captured", Overflows, {}),
        ("captured", NotANumber, {}),
        pytest.param("captured", Overflows, REPLICAS, marks=pytest.mark.slow),
    ],
    ids=["eager, NaN", "captured", "captured, NaN", "replicas"],
)
def test_an_overflow_skips_one_step_as_under_ddp(ranks: Ranks, kind: str, make: Any, options: dict[str, Any]) -> None:
    for ddp, ours in ranks.run(2, fit_both, kind, make, options, deadline=120):
        assert ddp["scales"][OVERFLOW] == ddp["scales"][OVERFLOW - 1] / 2
        assert ours["scales"] == ddp["scales"]
        assert ours["steps"] == ddp["steps"]
        assert ddp["steps"][OVERFLOW] == ddp["steps"][OVERFLOW - 1] == OVERFLOW
        assert_close_relative(ours["state"], ddp["state"], 1e-3, what="weights")
        assert ours["device decides"] == (kind == "captured")
