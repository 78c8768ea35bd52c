"""Compare a loop under Fabric with the same loop under DDP."""

from typing import Any

import pytest
import torch

from lightning_zero.engine import engine_of
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.fabric import NORM, VALUE, closing, make_fabric, network, set_up, train, whole_state
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL
from tests.ranks.pool import Ranks

CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": NORM},
    "max": {"max_norm": VALUE, "norm_type": float("inf")},
    "value": {"clip_val": VALUE},
}


def train_under(kind: str, clip: str, separately: bool = False, batches: int = 40, **options: Any) -> dict[str, Any]:
    fabric = make_fabric(kind, **options)
    model, optimizer = set_up(fabric, network(), separately)
    with closing(model):
        losses, norms = train(fabric, model, optimizer, batches, CLIPS[clip])
        found = {"losses": losses, "norms": norms, "state": whole_state(model)}
        engine = engine_of(model.module)
        compiled = engine is not None and engine.session.progress.metrics.get("graphs", 0)
        replayed = engine is not None and engine.executor.counters().get("replayed_graphs", 0)
        captured = engine is not None and isinstance(
            engine.optimizers.stepper(optimizer.optimizer).runner, CapturedRunner
        )
    torch._dynamo.reset()
    return {"found": found, "compiled": compiled, "replayed": replayed, "captured": captured}


def train_under_both(kind: str, clip: str, *args: Any) -> list[dict[str, Any]]:
    return [train_under(name, clip, *args) for name in ("ddp", kind)]


@pytest.mark.parametrize(
    ("kind", "clip", "separately"),
    [
        ("compiled", "norm", False),
        ("compiled", "value", True),
        ("replayed", "norm", False),
        ("eager", "norm", True),
        ("eager", "max", False),
    ],
)
def test_twenty_accumulated_clipped_steps_equal_ddps(ranks: Ranks, kind: str, clip: str, separately: bool) -> None:
    for ddp, ours in ranks.run(2, train_under_both, kind, clip, separately):
        assert_close_relative(ours["found"], ddp["found"], RTOL)
        assert len(ddp["found"]["norms"]) == (0 if clip == "value" else 20)
        assert (ours["compiled"] > 0) == (kind != "eager")
        # The first of the 40 batches run before forward and backward are captured.
        assert ours["replayed"] >= 50 if kind == "replayed" else not ours["replayed"]
        assert ours["captured"] == (kind == "replayed")
