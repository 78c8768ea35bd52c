"""Continue an asynchronous save after its training stops waiting, without effect on the next save.

A save that has ended leaves nothing.
"""

import gc
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_zero.checkpoint.async_save import saver
from lightning_zero.checkpoint.async_save.writer_process import WriterProcess
from tests.helpers.noted_saves import NotedSaves
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

OPTIONS = {"state_dict_type": "sharded", "async_save": True}


def _slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write nothing of the first save for a second."""
    write = WriterProcess.write

    def slow(self: WriterProcess, order: Any, *args: Any) -> Any:
        if order.path.endswith("/1.ckpt"):
            time.sleep(1.0)
        return write(self, order, *args)

    monkeypatch.setattr(WriterProcess, "write", slow)


class InterruptsWait(NotedSaves):
    """Raise KeyboardInterrupt while the second save waits for the first; the third is the one after it."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step != 2:
            return

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
            monkeypatch.setattr(saver._SaveThread, "join", interrupted)
            trainer.save_checkpoint(f"{self.home}/2.ckpt")


@forked_writers()
def _interrupted(home: str) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _slowly(monkeypatch)
        saves, module = InterruptsWait(home, (1, 3)), Regression()
        make_trainer("eager", callbacks=[saves], **OPTIONS).fit(module, make_loader("eager"))
        close(module)
    return saves.compare(sharded=True)


def test_a_save_after_ctrl_c_waits_for_the_one_that_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _interrupted, str(tmp_path))[0] == 2 * 2 * 6


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            raise ValueError("on every rank")


@forked_writers()
def _trained_again(home: str) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _slowly(monkeypatch)
        monkeypatch.setattr(saver, "GIVE_UP_S", 0.1)
        monkeypatch.setattr(saver, "GIVE_UP_ALONE_S", 0.1)
        first, second, module = NotedSaves(home, (1,)), NotedSaves(home, (2,)), Regression()
        with pytest.raises(ValueError, match="on every rank"):
            make_trainer("eager", callbacks=[first, Fails()], **OPTIONS).fit(module, make_loader("eager"))
        make_trainer("eager", callbacks=[second], **OPTIONS).fit(module, make_loader("eager"))
        close(module)
    return first.compare(sharded=True), second.compare(sharded=True)


def test_a_training_after_a_failed_one_saves_when_its_last_save_is_over(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, _trained_again, str(tmp_path)) == [(2 * 6, 2 * 6)]


class SavesOften(pl.Callback):
    """Without Python's garbage collector; notes how many files are open."""

    def __init__(self, path: str) -> None:
        self.path, self.open = path, list[int]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            gc.disable()
        trainer.save_checkpoint(self.path)
        self.open.append(len(os.listdir("/proc/self/fd")))


@forked_writers()
def _often(path: str) -> int:
    saves, module = SavesOften(path), Regression()
    try:
        make_trainer("eager", callbacks=[saves], **OPTIONS).fit(module, make_loader("eager", 12))
    finally:
        gc.enable()
    close(module)
    return max(saves.open[6:]) - max(saves.open[2:6])


def test_a_save_that_is_over_holds_no_file(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, _often, str(tmp_path / "x.ckpt")) == [0]
