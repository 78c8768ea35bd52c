"""Compare the files that ``ModelCheckpoint`` keeps, in all its modes, with those under DDP.

Also after a resume. test_model_checkpoint.py covers the best and the last one under failures.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, model_checkpoint
from torch import Tensor

from lightning_zero.integrations.checkpoint_files import read_folder
from tests.helpers.saved import Scheduled
from tests.helpers.trainer import close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

STEPS, EPOCHS = 6, 2
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {"state_dict_type": "sharded"},
    "full, async": {"state_dict_type": "full", "async_save": True},
    "sharded, async": {"state_dict_type": "sharded", "async_save": True},
}


class Judged(Scheduled):
    """Validation metric with another value each time: the third is the best, and one is no number."""

    FOUND = (3.0, 2.0, 1.0, float("nan"), 2.5, 2.0, 1.5, 4.0)

    def __init__(self) -> None:
        super().__init__()
        self.judged = 0

    def on_validation_epoch_end(self) -> None:
        self.log("val/quality", self.FOUND[self.judged % len(self.FOUND)], sync_dist=True)
        self.judged += 1

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every 4 steps": ({"every_n_train_steps": 4, "save_top_k": -1}, {}),
    "every 2 steps of 2 batches": ({"every_n_train_steps": 2, "save_top_k": -1}, {"accumulate_grad_batches": 2}),
    "every second epoch": ({"every_n_epochs": 2, "save_top_k": -1}, {}),
    "the best two": ({"monitor": "val/quality", "save_top_k": 2, "save_last": "link"}, {"val_check_interval": 2}),
    "the worst, in folders of its own": (
        {"monitor": "val/quality", "mode": "max", "filename": "{epoch}/{val/quality:.1f}", "save_last": True},
        {"val_check_interval": 2, "max_epochs": 1},
    ),
    "the last only": ({"save_top_k": 0, "save_last": True, "every_n_train_steps": 3}, {}),
    "of one name": ({"filename": "x y%=1-é", "save_top_k": -1, "every_n_train_steps": 5}, {}),
    "of one name, one of them": (
        {"filename": "one", "save_top_k": -1, "every_n_train_steps": 5, "enable_version_counter": False},
        {},
    ),
    "weights": ({"save_weights_only": True, "every_n_train_steps": 6, "save_top_k": -1}, {}),
    "by the clock": ({"train_time_interval": timedelta(seconds=25), "save_top_k": -1}, {}),
}
# The time of a save does not depend on its kind, so asynchronous saves are tried only if names and folders of
# saves that go on may be in each other's way, and without optimizers.
NAMING = (
    "weights",
    "the best two",
    "the worst, in folders of its own",
    "the last only",
    "of one name",
    "of one name, one of them",
)


class Clock:
    """Lookups that take another time on each rank; rank 0's decide."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 10.0 if dist.get_rank() == 0 else 3.0
        return self.now


def _kept(home: Path) -> dict[str, tuple[int, int, bool]]:
    """Return the step and the epoch of each file, and True if it holds optimizers."""
    found = {}
    for path in sorted(home.rglob("*.ckpt")):
        content = read_folder(path, None) if path.is_dir() else torch.load(path, weights_only=True)
        states = content.get("optimizer_states", content.get("optimizer_0"))
        found[str(path.relative_to(home))] = content["global_step"], content["epoch"], bool(states)
    assert all(path.name.endswith(".ckpt") or path.parent.suffix == ".ckpt" for path in home.rglob("*.*")), "left over"
    return found


def _fit(kind: str, home: str, name: str, path: str | None = None, **more: Any) -> tuple[Any, ...]:
    how, options = WAYS[name]
    keeps, module = ModelCheckpoint(home, **{"filename": "{step}"} | how), Judged()
    given = {"max_epochs": EPOCHS} | options | KINDS.get(kind, {}) | more
    trainer = make_trainer("eager" if kind in KINDS else kind, callbacks=[keeps], enable_checkpointing=True, **given)
    with patch.object(model_checkpoint, "time", Clock()):
        trainer.fit(module, make_loader("eager", STEPS), make_loader("eager", 1), ckpt_path=path)
    close(module)
    dist.barrier()
    best = {Path(path).name: float(value) for path, value in keeps.best_k_models.items()}
    return _kept(Path(home)), Path(keeps.best_model_path).name, Path(keeps.last_model_path).name, best


@forked_writers()
def _all_ways(kind: str, home: str) -> dict[str, Any]:
    ways = NAMING if kind.endswith("async") else WAYS
    found = {name: _fit(kind, f"{home}/{number}", name) for number, name in enumerate(ways)}
    # one that goes on knows which were the best, and removes them when others are better
    _fit(kind, f"{home}/resumed", "the best two", max_epochs=1)
    found["resumed"] = _fit(kind, f"{home}/resumed", "the best two", f"{home}/resumed/last.ckpt")
    return found


@pytest.fixture(scope="module")
def under_ddp(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run(2, _all_ways, "ddp", str(tmp_path_factory.mktemp("ddp")), deadline=120)[0]


@pytest.mark.exhaustive  # test_model_checkpoint.py keeps the best and the last
@pytest.mark.parametrize(
    "kind",
    ["sharded, async", "sharded", "full, async"],
)
def test_what_is_kept_is_what_is_kept_under_ddp(
    ranks: Ranks, tmp_path: Path, under_ddp: dict[str, Any], kind: str
) -> None:
    for found in ranks.run(2, _all_ways, kind, str(tmp_path), deadline=120):
        for name, kept in found.items():
            assert kept == under_ddp[name], name
    assert len(under_ddp["every 4 steps"][0]) == 3
    assert len(under_ddp["the best two"][0]) == 3
    assert len(under_ddp["by the clock"][0]) > 2
    assert not any(states for _, _, states in under_ddp["weights"][0].values())
