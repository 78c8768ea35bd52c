"""LoRA by PEFT over weights in `frozen_dtype`: validate, resume, exchange files with DDP, merge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.sharding.weight_format import WeightFormat
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import Regression, make_loader, make_trainer, seeded, whole_state
from tests.ranks.pool import Ranks

STEPS = 4


class Adapted(Regression):
    def __init__(self, dequantized: bool = False) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        if dequantized:
            for linear in self.net:
                if isinstance(linear, nn.Linear):
                    packing = WeightFormat("nf4", linear.weight.shape, linear.weight.dtype)
                    linear.weight.data = packing.decode(packing.encode(linear.weight))
        with seeded():
            lora = LoraConfig(r=8, target_modules=["0", "2", "4"], init_lora_weights=False)
            self.net = get_peft_model(self.net, lora)

    def forward(self, x: Tensor) -> Tensor:
        return self.net.base_model.model(x)


def fit(kind: str, steps: int, resume: str | None = None, save: str | None = None, **options: Any) -> dict[str, Any]:
    """Return losses, weights and the output of the merged model after ``steps``."""
    module = Adapted(dequantized=kind == "ddp")
    trainer = make_trainer(
        kind, max_epochs=-1, max_steps=steps, val_check_interval=STEPS, check_val_every_n_epoch=None, **options
    )
    trainer.fit(module, make_loader(kind, STEPS), make_loader(kind, 1, seed=1), ckpt_path=resume)
    found = {"losses": module.losses, "val_loss": trainer.callback_metrics["val_loss"], "weights": whole_state(module)}
    if save is not None:
        trainer.save_checkpoint(save)
    if engine_of(module) is not None:
        lightning_zero.unshard(module)
    merged = module.net.merge_and_unload()
    found["classes"] = sorted({type(part).__name__ for part in merged.modules()})
    with torch.no_grad():
        found["merged"] = merged(torch.ones(2, merged[0].in_features))
    return found


def train_all(home: str) -> dict[str, Any]:
    full, sharded, ddp = (f"{home}/{name}.ckpt" for name in ("full", "sharded", "ddp"))
    nf4 = {"frozen_dtype": "nf4"}
    return {
        "ddp": fit("ddp", 2 * STEPS),
        "at once": fit("compiled", 2 * STEPS, **nf4),
        "saved": fit("compiled", STEPS, save=full, **nf4),
        "saved in parts": fit("eager", STEPS, save=sharded, state_dict_type="sharded", **nf4),
        "saved by ddp": fit("ddp", STEPS, save=ddp),
        "resumed": fit("compiled", 2 * STEPS, full, **nf4),
        "resumed from parts": fit("compiled", 2 * STEPS, sharded, **nf4),
        "resumed from ddp": fit("compiled", 2 * STEPS, ddp, **nf4),
        "resumed by ddp": fit("ddp", 2 * STEPS, full),
    }


def test_adapters_train_resume_and_merge_as_over_dequantized_weights_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for found in ranks.run(2, train_all, str(tmp_path), deadline=240):
        expected = found.pop("ddp")
        frozen = [name for name in expected["weights"] if "lora" not in name]
        assert all("base_layer" in name for name in frozen)
        for what, other in found.items():
            assert all(torch.equal(other["weights"][name], expected["weights"][name]) for name in frozen), what
            assert other["classes"] == expected["classes"] == ["Linear", "Sequential", "Tanh"]
            if "saved" in what:
                continue
            for key in ("val_loss", "weights", "merged"):
                assert_close_relative(other[key], expected[key], 3e-6, what=f"{key} of {what}")
            assert_close_relative(other["losses"][-STEPS:], expected["losses"][-STEPS:], 3e-6, what=f"losses of {what}")
        assert found["resumed"]["losses"] == found["at once"]["losses"][STEPS:]
