"""Train with `state_dtype="bf16"`: resume its checkpoints with and without it, and under DDP."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_zero.engine import engine_of
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
LARGE, SMALL = "0.weight", "2.weight"


def fit(kind: str, steps: int, resume: str | None = None, **options: Any) -> Any:
    module = Wide()
    trainer = make_trainer(kind, max_epochs=-1, max_steps=steps, gradient_clip_val=0.1, **options)
    trainer.fit(module, make_loader(kind, 1), ckpt_path=resume)  # the same batch, wherever a training goes on
    return trainer, module


def all_of(module: Any) -> dict[str, Any]:
    """The weights, and on rank 0 the optimizer's state, by name."""
    engine, optimizer = engine_of(module), module.optimizers().optimizer
    state = (engine.optimizer_state(optimizer) if engine else optimizer.state_dict()).get("state", {})
    names = [name.removeprefix("net.") for name, _ in module.named_parameters()]
    return {"weights": whole_state(module), "state": {names[number]: dict(kept) for number, kept in state.items()}}


def save_and_resume(kind: str, home: str) -> dict[str, Any]:
    """Return twice as many steps in one run and with a resume, from files of either kind and by DDP."""
    trainer, module = fit(kind, 2 * STEPS, state_dtype="bf16")
    check_captured(trainer)
    found: dict[str, Any] = {"at once": all_of(module), "resumed": [], "wide": []}
    close(module)
    for form in ("full", "sharded"):
        trainer, module = fit(kind, STEPS, state_dtype="bf16", state_dict_type=form)
        path = f"{home}/{kind}-{form}.ckpt"
        trainer.save_checkpoint(path)
        found["saved"] = all_of(module)
        close(module)
        for options in ({"state_dtype": "bf16"}, {"state_dtype": "bf16", "offload": ("optimizer",)}, {}):
            _, module = fit(kind, 2 * STEPS, resume=path, **options)
            found["resumed" if options else "wide"].append(all_of(module))
            close(module)
    _, module = fit("ddp", STEPS, resume=f"{home}/{kind}-full.ckpt")
    found["read by ddp"] = all_of(module)
    return found


@pytest.mark.parametrize("kind", ["eager", "captured"])
@pytest.mark.exhaustive_variants("eager")
def test_a_training_goes_on_to_the_last_bit_and_files_are_read_with_and_without_it(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    results = ranks.run(2, save_and_resume, kind, str(tmp_path), deadline=200)
    for found in results:
        for other in found["resumed"]:
            torch.testing.assert_close(other, found["at once"], rtol=0, atol=0)
        for other in found["wide"]:
            torch.testing.assert_close(other["weights"], found["at once"]["weights"], rtol=0, atol=STEPS * 1e-2)
    first = results[0]
    assert dtypes(first["saved"]) == {LARGE: torch.bfloat16, SMALL: torch.float32}
    assert dtypes(first["wide"][0]) == dtypes(first["read by ddp"]) == dict.fromkeys((LARGE, SMALL), torch.float32)
    torch.testing.assert_close(first["read by ddp"]["weights"], first["saved"]["weights"], rtol=0, atol=0)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        theirs, ours = (first[where]["state"][LARGE][key] for where in ("read by ddp", "saved"))
        assert torch.equal(theirs, ours.float())


def dtypes(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found["state"][name]["exp_avg"].dtype for name in (LARGE, SMALL)}


def from_ddp(home: str) -> list[dict[str, Any]]:
    """Return a checkpoint of DDP and its loaded state, without a step after that."""
    trainer, module = fit("ddp", STEPS)
    trainer.save_checkpoint(f"{home}/ddp.ckpt")
    found = [all_of(module)]
    for on_host in ((), ("optimizer",)):
        _, module = fit("eager", STEPS, f"{home}/ddp.ckpt", state_dtype="bf16", offload=on_host)
        found.append(all_of(module))
        held: list[Tensor] = [v for kept in module.optimizers().optimizer.state.values() for v in kept.values()]
        assert {value.dtype for value in held if value.numel() > 2100} == {torch.bfloat16}  # of the large one's shards
        close(module)
    return found


def test_what_ddp_has_saved_is_rounded_to_the_nearest_as_it_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    theirs, *ours = ranks.run(2, from_ddp, str(tmp_path), deadline=120)[0]
    for found in ours:
        torch.testing.assert_close(found["weights"], theirs["weights"], rtol=0, atol=0)
        for name, entries in theirs["state"].items():
            for key, value in entries.items():
                expected = value.to(torch.bfloat16) if name == LARGE and value.dim() else value
                torch.testing.assert_close(found["state"][name][key], expected, rtol=0, atol=0)


def with_an_overflow(kind: str) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
    with patch("lightning_zero.optim.bf16_state.MIN_NUMEL", 1):
        trainer, module = make_trainer(kind, plugins=[plugin], gradient_clip_val=0.2, state_dtype="bf16"), Overflows()
        trainer.fit(module, make_loader(kind, 6))
        check_captured(trainer)
        found = {"scales": module.scales, "steps": module.steps} | all_of(module)
        close(module)
    return found


def overflows() -> list[dict[str, Any]]:
    return [with_an_overflow(kind) for kind in ("eager", "captured")]


def test_a_step_that_is_skipped_for_an_overflow_is_skipped_alike(ranks: Ranks) -> None:
    eager, captured = ranks.run(2, overflows, deadline=120)[0]
    torch.testing.assert_close(captured, eager, rtol=0, atol=0)
    assert eager["steps"][-1] == len(eager["steps"]) - 1
    assert {kept["exp_avg"].dtype for kept in eager["state"].values()} == {torch.bfloat16}
