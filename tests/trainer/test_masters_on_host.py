"""Train with `offload=("optimizer", "parameters")`, set by hand and by `memory=`.

Checkpoints of either kind, averages of weights and evaluation are the same with and without it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_zero.engine import engine_of
from tests.helpers.trainer import Regression, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks

AWAY: dict[str, Any] = {"offload": ("optimizer", "parameters"), "offload_buffer_mb": 0.0001}
WAYS: tuple[dict[str, Any], ...] = ({"gather_transport": "collective"}, AWAY)
STEPS = 3


class Evaluated(Regression):
    """Has two groups, one of which is offloaded. Records the values of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if p.dim() == dim]} for dim in (2, 1)]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4)


def fit(steps: int, resume: str | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    module = Evaluated()
    more = {"gradient_clip_val": 0.1, "precision": "bf16-mixed", "check_val_every_n_epoch": 1}
    callbacks = [EMAWeightAveraging(decay=0.6)]
    kind = "compiled, captured"
    trainer = make_trainer(kind, max_epochs=-1, max_steps=steps, callbacks=callbacks, **more, **options)
    loaders = make_loader(kind, STEPS), make_loader(kind, 2, seed=1)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer, module


def planned() -> dict[str, Any]:
    """Options by which a plan does the same: a limit that requires it, without gradient aliasing."""
    apart = {"grad_aliasing": False}
    trainer, module = fit(1, memory=1.0, **apart)
    engine, plan = engine_of(module), trainer.strategy.memory_plan
    assert engine is not None
    limit = (plan.peak - engine.session.planner.known.states - 1) / 2**30
    close(module)
    return {"memory": limit, "offload_buffer_mb": AWAY["offload_buffer_mb"], **apart}


def all_of(module: Any, leaves: bool) -> dict[str, Any]:
    engine = engine_of(module)
    assert engine is not None
    state = engine.optimizer_state(module.optimizers().optimizer)
    away = [record.name for record in engine.sharder.live if record.is_on_host]
    assert len(away) == 3 * leaves
    found = {"weights": whole_state(module), "state": state["state"] if state else {}, "seen": module.seen}
    close(module)
    return found


def save_and_resume(home: str) -> list[dict[str, Any]]:
    """Return twice as many steps in one run and with a resume.

    Covers offload and none, by hand and by a plan, in files of either kind.
    """
    found, plan = [], planned()
    for form, way, others in (("full", WAYS[0], (AWAY, plan)), ("sharded", plan, WAYS)):
        trainer, module = fit(STEPS, **way, state_dict_type=form)
        path = f"{home}/{form}.ckpt"
        trainer.save_checkpoint(path)
        close(module)
        found += [all_of(fit(2 * STEPS, resume=path, **other)[1], other is not WAYS[0]) for other in others]
    return found


@pytest.mark.exhaustive  # see test_offload.py
def test_checkpoints_with_and_without_it_are_the_same(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(1, save_and_resume, str(tmp_path), deadline=240):
        assert found[0]["seen"]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)
