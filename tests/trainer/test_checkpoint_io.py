"""Call a CheckpointIO as Lightning's strategies do: options, its inner IO, and ``torch.save``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zero import ZeroStrategy
from lightning_zero.integrations.checkpoint_files import BackgroundFileIO, FileIO
from tests.helpers.saved import Scheduled
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks


class Noting(TorchCheckpointIO):
    """A user's own, which takes options."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.options.append(storage_options)
        super().save_checkpoint(checkpoint, path)


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, beside": {"async_save": True},
    "full, the plugin": {"plugins": [AsyncCheckpointIO()]},
    "full, Lightning's": {"plugins": [TorchCheckpointIO()]},
    "sharded": {"state_dict_type": "sharded"},
}


def _saved_with_options(home: str) -> dict[str, Any]:
    ends: dict[str, Any] = {}
    for name, arguments in WAYS.items():
        module, trainer = Regression(), make_trainer("eager", **arguments)
        trainer.fit(module, make_loader("eager"))
        try:
            trainer.save_checkpoint(f"{home}/x.ckpt", storage_options={"key": 1})
            ends[name] = None
        except Exception as error:  # each strategy's own
            ends[name] = type(error).__name__, str(error)
        close(module)
    mine = Noting()
    module, trainer = Regression(), make_trainer("eager", plugins=[mine])
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(f"{home}/y.ckpt", storage_options={"key": 1})
    trainer.save_checkpoint(f"{home}/y.ckpt")
    close(module)
    return {"ends": ends, "mine": mine.options, "there": sorted(os.listdir(home))}


def test_storage_options_reach_the_checkpoint_io_or_raise_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(2, _saved_with_options, str(tmp_path))):
        *full, sharded = found["ends"].items()
        names = ["FileIO", "BackgroundFileIO", "BackgroundFileIO", "TorchCheckpointIO"]
        for (way, (kind, text)), name in zip(full, names, strict=True):
            assert kind == "TypeError", way
            assert f"`storage_options` arg is not supported for `{name}`" in text, way
        assert sharded[1][0] == "MisconfigurationException"
        assert "save with state_dict_type='full'" in sharded[1][1]
        assert found["mine"] == ([{"key": 1}, None] if rank == 0 else [])
        assert found["there"] == ["y.ckpt"]


def _calls_of_torch_save(kind: str, home: str) -> int:
    module = Scheduled()
    keeps = ModelCheckpoint(
        home, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True
    )
    trainer = make_trainer(kind, callbacks=[keeps], enable_checkpointing=True)
    with patch("torch.save", wraps=torch.save) as save:
        trainer.fit(module, make_loader(kind))
        trainer.save_checkpoint("memory://calls/x.ckpt")
    close(module)
    return save.call_count


def test_torch_save_is_called_as_often_as_without_the_strategy(ranks: Ranks, tmp_path: Path) -> None:
    """Also a function that stands in its place when the checkpoint is saved."""
    for rank, calls in enumerate(ranks.run(2, _calls_of_torch_save, "eager", str(tmp_path / "ours"))):
        assert calls == (9 if rank == 0 else 0)
    (calls,) = ranks.run(1, _calls_of_torch_save, "single", str(tmp_path / "single"))
    assert calls == 9


class Wraps(Callback):
    """Counts the calls of the inner CheckpointIO."""

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        inner = trainer.strategy.checkpoint_io.checkpoint_io
        inner.save_checkpoint = Mock(wraps=inner.save_checkpoint)
        inner.remove_checkpoint = Mock(wraps=inner.remove_checkpoint)


def _saved_by_inner(home: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("option", "plugin", "wrapped plugin"):
        io = AsyncCheckpointIO()
        if name == "wrapped plugin":
            io.save_checkpoint = Mock(wraps=io.save_checkpoint)  # type: ignore[method-assign]
        options: dict[str, Any] = {"async_save": True} if name == "option" else {"plugins": [io]}
        keeps = ModelCheckpoint(
            f"{home}/{name}", "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1
        )
        module = Regression()
        trainer = make_trainer("eager", callbacks=[Wraps(), keeps], enable_checkpointing=True, **options)
        trainer.fit(module, make_loader("eager"))
        inner: Any = trainer.strategy.checkpoint_io.checkpoint_io  # type: ignore[attr-defined]
        found[name] = [type(trainer.strategy.checkpoint_io).__name__, type(inner).__name__]
        found[name] += [inner.save_checkpoint.call_count, inner.remove_checkpoint.call_count]
        found[name] += [getattr(io.save_checkpoint, "call_count", None), sorted(os.listdir(f"{home}/{name}"))]
        close(module)
    return found


def test_the_inner_checkpoint_io_saves_and_removes(ranks: Ranks, tmp_path: Path) -> None:
    left = ["step=3.ckpt", "step=4.ckpt"]
    (found,) = ranks.run(1, _saved_by_inner, str(tmp_path))
    assert found["option"] == ["BackgroundFileIO", "FileIO", 4, 2, None, left]
    assert found["plugin"] == ["BackgroundFileIO", "FileIO", 4, 2, None, left]
    *counts, names = found["wrapped plugin"]
    assert counts == ["AsyncCheckpointIO", "FileIO", 4, 2, 4]
    # Lightning's plugin removes at once and saves later: a file that is removed before its save ran remains.
    assert set(left) <= set(names)


def test_a_plugin_with_methods_of_its_own_is_kept() -> None:
    io = AsyncCheckpointIO()
    io.remove_checkpoint = Mock(wraps=io.remove_checkpoint)  # type: ignore[method-assign]
    strategy = ZeroStrategy(checkpoint_io=io)
    assert strategy.checkpoint_io is io
    assert type(io.checkpoint_io) is FileIO
    assert strategy.saves_async
    with pytest.raises(AttributeError, match="checkpoint_io"):
        BackgroundFileIO().checkpoint_io = io  # type: ignore[misc]


def _with_a_mock() -> int:
    module, callback = Regression(), Mock(spec=ModelCheckpoint)
    trainer = make_trainer("eager", callbacks=[callback], enable_checkpointing=True)
    trainer.fit(module, make_loader("eager"))
    close(module)
    return callback.on_train_batch_end.call_count


def test_a_mock_of_a_checkpoint_callback_is_called(ranks: Ranks) -> None:
    assert ranks.run(1, _with_a_mock) == [4]
