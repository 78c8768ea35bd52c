"""Callbacks that stop, save and measure do it as under DDP."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor

from tests.helpers.callbacks import Lines
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    RTOL,
    Regression,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks


class Turning(Regression):
    """Its validation loss falls, rises and falls again."""

    HEIGHTS = (3.0, 1.0, 2.0, 4.0, 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch) * 1e-3 + self.HEIGHTS[self.current_epoch], sync_dist=True)


def _saved(kind: str, home: str) -> dict[str, Any]:
    folder = Path(home) / kind
    callbacks = [
        ModelCheckpoint(folder / "best", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1),
        ModelCheckpoint(folder / "weights", "{epoch}", every_n_epochs=2, save_top_k=-1, save_weights_only=True),
        EarlyStopping("val_loss", patience=2, min_delta=0.01),
    ]
    module = Turning()
    trainer = make_trainer(kind, max_epochs=5, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, make_loader(kind), make_loader(kind, 1, seed=1))
    check_captured(trainer)
    best = callbacks[0]
    assert isinstance(best, ModelCheckpoint)
    trainer.strategy.barrier()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
    out = {
        "files": files,
        "best": Path(best.best_model_path).name,
        "scores": sorted(float(score) for score in best.best_k_models.values()),
        "stopped": (trainer.current_epoch, trainer.global_step),
        "losses": global_losses(kind, module),
        "saved": [torch.load(folder / file, weights_only=True)["state_dict"] for file in files],
    }
    trainer.validate(module, make_loader(kind, 1, seed=1), ckpt_path="best", weights_only=True, verbose=False)
    out["from the best"] = whole_state(module), trainer.callback_metrics["val_loss"].item()
    close(module)
    return out


def _saved_under(kinds: list[str], home: str) -> dict[str, Any]:
    return {kind: _saved(kind, home) for kind in kinds}


@pytest.mark.parametrize("kind", ["captured", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.exhaustive_variants("compiled")
def test_what_is_saved_and_when_training_stops_equal_ddps(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for result in ranks.run(2, _saved_under, ["ddp", kind], str(tmp_path)):
        ours, ddp = result[kind], result["ddp"]
        assert ddp["stopped"] == (4, 16)
        assert ddp["best"] == "epoch=1.ckpt"
        assert len(ddp["files"]) == 3 + 5 + 2
        assert ours["files"] == ddp["files"]
        assert ours["best"] == ddp["best"]
        for key in ("scores", "stopped", "losses", "saved", "from the best"):
            assert_close_relative(ours[key], ddp[key], 3 * RTOL, what=key)


class Measured(Regression):
    flops_per_batch = 1000


def _measured(kind: str) -> list[tuple[int, dict[str, float]]]:
    lines, module = Lines(), Measured()
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: 7, window_size=2)
    trainer = make_trainer(kind, logger=lines, log_every_n_steps=1, callbacks=[monitor])
    trainer.fit(module, make_loader(kind), make_loader(kind, 2, seed=1))
    close(module)
    return lines.lines


def _measured_under(*kinds: str) -> dict[str, Any]:
    return {kind: _measured(kind) for kind in kinds}


def test_throughput_is_measured_over_the_same_samples(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(2, _measured_under, "ddp", "eager")):
        ours, ddp = result["eager"], result["ddp"]
        assert [(step, sorted(line)) for step, line in ours] == [(step, sorted(line)) for step, line in ddp]
        counted = [
            [(key, value) for key, value in line.items() if key.endswith(("samples", "batches", "lengths"))]
            for lines in (ours, ddp)
            for _, line in lines
        ]
        assert counted[: len(ours)] == counted[len(ours) :]
        if rank == 0:
            assert any(key.endswith("samples_per_sec") for _, line in ours for key in line)


def _clocked(*kinds: str) -> dict[str, Any]:
    """Measure throughput by a clock that advances by one second at each ``time.perf_counter()``."""
    found = {}
    for kind in kinds:
        with patch("time.perf_counter", side_effect=itertools.count()):
            found[kind] = _measured(kind)
    return found


def test_throughput_is_measured_by_a_clock_that_nobody_else_reads(ranks: Ranks) -> None:
    (found,) = ranks.run(1, _clocked, "single", "eager", "compiled, captured")
    times = {kind: [line[key] for _, line in lines for key in line if "/time" in key] for kind, lines in found.items()}
    assert len(times["single"]) == 6
    assert times["eager"] == times["single"]
    assert times["compiled, captured"] == times["single"]


class Stops(pl.Callback):
    """On one rank only: the others must hear of it."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(True, all=False)
        elif trainer.global_step == 2:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(False, all=False)


def _stopped(*kinds: str) -> dict[str, int]:
    out = {}
    for kind in kinds:
        module, trainer = Regression(), make_trainer(kind, callbacks=[Stops()])
        trainer.fit(module, make_loader(kind))
        out[kind] = trainer.global_step
        close(module)
    return out


def test_one_rank_stops_all(ranks: Ranks) -> None:
    assert ranks.run(2, _stopped, "ddp", "eager") == [{"ddp": 2, "eager": 2}] * 2
