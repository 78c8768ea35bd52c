"""Train with `precision="bf16-true"` and `bf16_stochastic_round`: clip, accumulate, resume, exchange files with DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, DataLoader

from lightning_zero.engine import engine_of
from tests.helpers.lightning_modules import Wide
from tests.helpers.trainer import check_captured, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks

STEPS, ACCUMULATE = 3, 2
TRUE: dict[str, Any] = {"precision": "bf16-true"}
ROUNDED: dict[str, Any] = TRUE | {"bf16_stochastic_round": True}


def make_equal_batches(kind: str) -> DataLoader:
    """Return the same micro-batch twice: wherever a training goes on, it gets the same."""
    batches = make_loader(kind, 1)
    return DataLoader(ConcatDataset([batches.dataset] * ACCUMULATE), batches.batch_size)


def fit(kind: str, steps: int, resume: str | None = None, save: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the weights, and on rank 0 the optimizer's state."""
    module = Wide()
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": ACCUMULATE} | options
    trainer = make_trainer(kind, max_epochs=-1, max_steps=steps, **options)
    trainer.fit(module, make_equal_batches(kind), ckpt_path=resume)
    check_captured(trainer)
    if save is not None:
        trainer.save_checkpoint(save)
    engine, optimizer = engine_of(module), module.optimizers().optimizer
    state = (engine.optimizer_state(optimizer) if engine else optimizer.state_dict()).get("state", {})
    found = {"weights": whole_state(module), "state": state}
    close(module)
    return found


def train_all(home: str) -> dict[str, Any]:
    full, sharded, ddp = (f"{home}/{name}.ckpt" for name in ("full", "sharded", "ddp"))
    found: dict[str, Any] = {"nearest": fit("captured", 2 * STEPS, **TRUE)}
    for state_dtype in (None, "8bit"):
        options = ROUNDED | {"state_dtype": state_dtype}
        at_once = fit("captured", 2 * STEPS, **options)
        fit("captured", STEPS, save=full, **options)
        fit("eager", STEPS, save=sharded, state_dict_type="sharded", **options)
        same = [fit("captured", 2 * STEPS, path, **options) for path in (full, sharded)]
        found[str(state_dtype)] = at_once, [*same, fit("eager", 2 * STEPS, **options)]
    fit("captured", STEPS, save=full, **ROUNDED)
    found["read by ddp"] = fit("ddp", 2 * STEPS, full)  # in float32
    found["of ddp"] = fit("ddp", STEPS, save=ddp)
    found["from ddp"] = fit("eager", STEPS, ddp, **ROUNDED)  # no step after that
    found["compiled"] = fit("compiled, captured", 2 * STEPS, **ROUNDED)
    found["refused"] = []
    for precision in ("32-true", "bf16-mixed", "16-true"):
        with pytest.raises(MisconfigurationException) as caught:
            fit("eager", 1, **ROUNDED | {"precision": precision})
        found["refused"].append(str(caught.value))
    return found


def test_steps_are_the_same_after_each_resume_and_files_are_read_in_float32_and_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks.run(2, train_all, str(tmp_path), deadline=250):
        for state_dtype in ("None", "8bit"):
            at_once, others = found[state_dtype]
            for other in others:
                torch.testing.assert_close(other, at_once, rtol=0, atol=0)
        weights = found["None"][0]["weights"]
        assert {value.dtype for value in weights.values()} == {torch.bfloat16}
        assert any(not torch.equal(found["nearest"]["weights"][key], value) for key, value in weights.items())
        for key, value in weights.items():
            # Sums of other code differ in their last bits, after which the noise decides otherwise.
            torch.testing.assert_close(found["compiled"]["weights"][key], value, rtol=2.0**-6, atol=5e-3)
            assert found["read by ddp"]["weights"][key].dtype is torch.float32
            assert torch.equal(found["from ddp"]["weights"][key], found["of ddp"]["weights"][key].to(torch.bfloat16))
        assert all("Pass precision='bf16-true'" in text for text in found["refused"])
