"""Save from several callbacks at one step, after an exception, and in validation, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, global_losses, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.slow

KINDS: list[dict[str, Any]] = [{"state_dict_type": kind, "async_save": True} for kind in ("full", "sharded")]
STOPPED = 5  # of eight steps, in the second epoch


class Seeing(Regression):
    """Notes which batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


class Raises(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STOPPED:
            raise KeyError("stopped")


def _keeping(home: str) -> list[pl.Callback]:
    always = timedelta(seconds=0)
    return [
        ModelCheckpoint(home, "n-{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=True, save_last=True),
        ModelCheckpoint(home, "t-{step}", train_time_interval=always, save_top_k=2, monitor="step", mode="max"),
        ModelCheckpoint(home, "e-{step}", every_n_epochs=1, save_top_k=-1, save_on_exception=True),
    ]


class SavesInside(pl.Callback):
    def __init__(self, home: str) -> None:
        self.home = home

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if trainer.global_step == 2 and number == 0:
            trainer.save_checkpoint(f"{self.home}/last.ckpt")


def _go_on(kind: str, callbacks: list[pl.Callback], path: str, **options: Any) -> tuple[list[float], list[float]]:
    module = Seeing()
    trainer = make_trainer(kind, max_epochs=2, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module, make_loader("eager"), make_loader("eager", steps=2), ckpt_path=path)
    assert trainer.global_step == 8
    found = global_losses(kind, module), module.seen
    close(module)
    return found


def _stopped(kind: str, home: str, options: dict[str, Any]) -> Any:
    module = Seeing()
    callbacks = [*_keeping(home), Raises()]
    trainer = make_trainer(kind, max_epochs=2, enable_checkpointing=True, callbacks=callbacks, **options)
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(module, make_loader("eager"))
    close(module)
    dist.barrier()
    kept = sorted(entry.name for entry in Path(home).iterdir())
    found = _go_on(kind, _keeping(home), "last", **options)
    dist.barrier()
    return found, (kept, sorted(entry.name for entry in Path(home).iterdir()))


def _inside(kind: str, home: str, options: dict[str, Any]) -> Any:
    chosen = options | {"val_check_interval": 2}
    module = Seeing()
    trainer = make_trainer(kind, max_epochs=2, callbacks=[SavesInside(home)], **chosen)
    trainer.fit(module, make_loader("eager"), make_loader("eager", steps=2))
    close(module)
    dist.barrier()
    return _go_on(kind, [], f"{home}/last.ckpt", **chosen), None


@forked_writers()
def _all_ways(work: Callable[..., Any], home: str) -> list[Any]:
    ways = [("ddp", {}), *(("eager", options) for options in KINDS)]
    return [work(kind, f"{home}/{number}", options) for number, (kind, options) in enumerate(ways)]


@pytest.mark.parametrize("work", [_stopped, _inside])
@pytest.mark.exhaustive_variants("_stopped")
def test_it_is_as_under_ddp(ranks: Ranks, tmp_path: Path, work: Callable[..., Any]) -> None:
    for wanted, *others in ranks.run(2, _all_ways, work, str(tmp_path), deadline=240):
        (losses, seen), kept = wanted
        assert losses
        assert len(others) == len(KINDS)
        for (found, batches), files in others:
            assert_close_relative(found, losses, 10 * RTOL)
            assert (batches, files) == (seen, kept)
