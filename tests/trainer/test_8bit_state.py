"""Train with `state_dtype="8bit"`: resume files of each form, exchange files with DDP, skip steps that overflow."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_zero.cli.main import main
from lightning_zero.engine import engine_of
from lightning_zero.optim.quantized_state import NONNEGATIVE, SIGNED, pack, unpack
from tests.helpers.lightning_modules import Overflows, Wide
from tests.helpers.trainer import (
    check_captured,
    close,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks

STEPS = 3
CODE_DTYPES = {"exp_avg": SIGNED, "exp_avg_sq": NONNEGATIVE}


def fit(kind: str, steps: int, resume: str | None = None, save: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the weights, and on rank 0 the optimizer's state."""
    module = Wide()
    trainer = make_trainer(kind, max_epochs=-1, max_steps=steps, gradient_clip_val=0.1, **options)
    trainer.fit(module, make_loader(kind, 1), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return kept(module)


def kept(module: Any) -> dict[str, Any]:
    engine, optimizer = engine_of(module), module.optimizers().optimizer
    state = (engine.optimizer_state(optimizer) if engine else optimizer.state_dict()).get("state", {})
    found = {"weights": whole_state(module), "state": state}
    close(module)
    return found


def with_an_overflow(kind: str) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
    with patch("lightning_zero.sharding.layout.MIN_STATE_BLOCKS_NUMEL", 1):
        trainer, module = make_trainer(kind, plugins=[plugin], gradient_clip_val=0.2, state_dtype="8bit"), Overflows()
        module.empty_ranks = True
        trainer.fit(module, make_loader(kind, 6))
        check_captured(trainer)
        steps = module.steps
        assert any(key.endswith("_codes") for one in module.optimizers().optimizer.state.values() for key in one)
        return {"steps": steps} | kept(module)


def train_all(home: str) -> dict[str, Any]:
    eight: dict[str, Any] = {"state_dtype": "8bit"}
    full, sharded, ddp = (f"{home}/{name}.ckpt" for name in ("full", "sharded", "ddp"))
    found = {"at once": fit("captured", 2 * STEPS, **eight)}
    found["saved"] = fit("captured", STEPS, save=full, **eight)
    fit("eager", STEPS, save=sharded, state_dict_type="sharded", **eight)
    found["resumed"] = [fit("captured", 2 * STEPS, path, **eight) for path in (full, sharded)]
    found["read by ddp"] = fit("ddp", STEPS, full)
    found["of ddp"] = fit("ddp", STEPS, save=ddp)
    found["from ddp"] = fit("eager", STEPS, ddp, **eight)
    found["overflows"] = [with_an_overflow(kind) for kind in ("eager", "captured")]
    return found


def test_files_of_each_form_and_of_ddp_are_resumed_and_overflows_are_skipped(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, train_all, str(tmp_path), deadline=200)
    for found in results:
        for other in found["resumed"]:
            torch.testing.assert_close(other, found["at once"], rtol=0, atol=0)
        eager, captured = found["overflows"]
        torch.testing.assert_close(captured, eager, rtol=0, atol=0)
        assert eager["steps"][-1] == len(eager["steps"]) - 1
    first = results[0]
    torch.testing.assert_close(first["read by ddp"], first["saved"], rtol=0, atol=0)
    torch.testing.assert_close(first["from ddp"]["weights"], first["of ddp"]["weights"], rtol=0, atol=0)
    for number, entries in first["of ddp"]["state"].items():
        for key, value in entries.items():
            large = value.numel() >= 4096
            expected = unpack(*pack(value, CODE_DTYPES[key])) if large else value
            assert torch.equal(first["from ddp"]["state"][number][key], expected)
    assert main(["checkpoint", "consolidate", f"{tmp_path}/sharded.ckpt", "--output", f"{tmp_path}/one.ckpt"]) == 0
    whole = torch.load(f"{tmp_path}/one.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    torch.testing.assert_close(whole, first["saved"]["state"], rtol=0, atol=0)
