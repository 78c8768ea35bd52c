"""Train with `offload=("optimizer",)`: losses and checkpoints of either kind equal those without it."""

from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_zero import FabricZeroStrategy, ZeroStrategy
from lightning_zero.engine import engine_of
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.lightning_modules import Overflows
from tests.helpers.trainer import Regression, check_captured, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks

ON_HOST: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 0.0001}
WAYS: tuple[dict[str, Any], ...] = ({}, ON_HOST)
STEPS = 3


class Groups(Regression):
    """Has two groups, and resets momentum after a backward at times, while state is being prefetched."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step % STEPS == STEPS - 1:
            for entries in optimizer.state.values():
                entries["exp_avg"].zero_()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4, amsgrad=True)


def fit(kind: str, steps: int, resume: str | None = None, **options: Any) -> Any:
    module = Groups()
    trainer = make_trainer(kind, max_epochs=-1, max_steps=steps, gradient_clip_val=0.1, **options)
    trainer.fit(module, make_loader(kind, STEPS), ckpt_path=resume)
    return trainer, module


def all_of(trainer: Any, module: Any) -> dict[str, Any]:
    engine = engine_of(module)
    state = engine.optimizer_state(module.optimizers().optimizer)
    roles = memory_by_role(engine, [module.optimizers().optimizer])
    away = "optimizer" in engine.config.offload
    assert (roles["optimizer_state_on_host"] > 1e3) == away
    found = {"weights": whole_state(module), "state": state["state"] if state else {}}
    close(module)
    return found


def save_and_resume(kind: str, home: str) -> list[dict[str, Any]]:
    """Return twice as many steps in one run and with a resume, with and without offload."""
    found = []
    # files written without it are the same with an eager and a captured step
    for written, way in enumerate(WAYS if kind == "captured" else [ON_HOST]):
        for form in ("full", "sharded"):
            trainer, module = fit(kind, STEPS, **way, state_dict_type=form)
            path = f"{home}/{kind}-{written}-{form}.ckpt"
            trainer.save_checkpoint(path)
            close(module)
            for other in WAYS:
                found.append(all_of(*fit(kind, 2 * STEPS, resume=path, **other)))
    return found


@pytest.mark.parametrize("kind", ["eager", "captured"])
@pytest.mark.exhaustive_variants("eager")
def test_checkpoints_with_and_without_it_are_the_same(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for found in ranks.run(2, save_and_resume, kind, str(tmp_path), deadline=120):
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def with_an_overflow(kind: str) -> list[dict[str, Any]]:
    found = []
    for way in WAYS:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
        trainer, module = make_trainer(kind, plugins=[plugin], gradient_clip_val=0.2, **way), Overflows()
        trainer.fit(module, make_loader(kind, 8))
        check_captured(trainer)
        found.append({"scales": module.scales, "steps": module.steps} | all_of(trainer, module))
    return found


@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_a_step_that_is_skipped_changes_nothing_on_the_host(ranks: Ranks, kind: str) -> None:
    for plain, away in ranks.run(2, with_an_overflow, kind, deadline=120):
        torch.testing.assert_close(away, plain, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [ZeroStrategy, FabricZeroStrategy])
def test_what_does_not_go_together_is_refused_by_name(strategy: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Pass offload=\('optimizer', 'parameters'\)"):
        strategy(offload=("parameters",))
    with pytest.raises(MisconfigurationException, match="with compile=False they stay on the device"):
        strategy(offload=("optimizer", "parameters"), compile=False)
    assert strategy(offload=["optimizer"])._options.offload == ("optimizer",)
    assert strategy(offload=UserList(["optimizer"]))._options.offload == ("optimizer",), "as Hydra's lists"
    with pytest.raises(ValueError, match=r"offload='optimizer' must be a tuple of .* Try \('optimizer',\)"):
        strategy(offload="optimizer")
