"""Copy and pickle modules, callbacks and Trainers after a fit as under DDP, with full parameters."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    Regression,
    close,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

WIDTH = 64


class Kept(Regression):
    """Calls `self(x)` in its steps, so that the LightningModule itself is compiled."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


class Best(pl.Callback):
    """Keeps the module of each epoch's end."""

    def __init__(self) -> None:
        self.modules: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.modules.append(copy.deepcopy(module))


def _copied(kind: str, precision: str, home: str) -> dict[str, Any]:
    module = Kept()
    trainer = make_trainer(
        kind, max_epochs=2, precision=precision, callbacks=[Best(), TQDMProgressBar()], enable_progress_bar=True
    )
    trainer.fit(module, make_loader(kind))
    x = torch.ones(2, INPUTS, dtype=module.dtype)
    out: dict[str, Any] = {"kept": [whole_state(kept) for kept in trainer.callbacks[0].modules]}
    path = Path(home) / f"{kind}-{trainer.global_rank}.pt"
    torch.save(module, path)
    made = {
        "module": copy.deepcopy(module),
        "saved": torch.load(path, weights_only=False),
        "trainer": copy.deepcopy(trainer).lightning_module,
        "callbacks": copy.deepcopy(trainer.callbacks)[0].modules[-1],
        "bar": pickle.loads(pickle.dumps(trainer.progress_bar_callback)).trainer.lightning_module,
    }
    out["state"] = whole_state(module)
    for name, other in made.items():
        assert type(other) is Kept
        assert engine_of(other) is None
        assert other._compiled_call_impl is None
        out[name] = whole_state(other), other(x).detach()
    # A copy trains by itself, under another strategy as under ours.
    copies = [made["module"], made["saved"]]
    for number, (other, strategy) in enumerate(zip(copies, ("ddp", kind), strict=True)):
        other.losses.clear()
        make_trainer(strategy, precision=precision).fit(other, make_loader(strategy))
        out[f"trained {number}"] = whole_state(other)
    assert_close_relative(whole_state(module), out["state"], 0.0)
    close(module, *copies)
    return out


def _copied_under(kinds: list[str], *args: Any) -> dict[str, Any]:
    return {kind: _copied(kind, *args) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "precision"), [("eager", "32-true"), ("compiled", "32-true"), ("eager", "bf16-mixed")]
)
@pytest.mark.exhaustive_variants("eager-bf16-mixed")
def test_copies_after_a_fit_are_ddps(ranks: Ranks, tmp_path: Path, kind: str, precision: str) -> None:
    rtol = 3 * RTOL if precision == "32-true" else 1e-2
    for result in ranks.run(2, _copied_under, ["ddp", kind], precision, str(tmp_path)):
        ours = result[kind]
        assert_close_relative(ours, result["ddp"], rtol)
        for name in ("module", "saved", "trainer", "callbacks", "bar"):
            assert_close_relative(dict(ours[name][0]), ours["state"], 0.0)


def _set_up_again() -> None:
    module, trainer = Kept(), make_trainer("eager")
    trainer.fit(module, make_loader("eager"))
    other = copy.deepcopy(trainer)
    assert other.optimizers == []
    assert other.strategy._engine is None
    (found,) = other.test(other.lightning_module, make_loader("eager"), verbose=False)
    (expected,) = trainer.test(module, make_loader("eager"), verbose=False)
    assert_close_relative(found, expected, 0.0)
    close(module, other.lightning_module)


def test_a_copied_trainer_runs(ranks: Ranks) -> None:
    ranks.run(2, _set_up_again)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_trainer_that_has_not_fitted_yet_is_copied(copied: Callable[[Any], Any]) -> None:
    trainer = pl.Trainer(strategy=ZeroStrategy(stage=2), accelerator="cpu", devices=1, logger=False, barebones=True)
    strategy = copied(trainer).strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy._options == trainer.strategy._options
