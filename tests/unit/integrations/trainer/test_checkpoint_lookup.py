"""Test that patches of Lightning change nothing for other strategies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_zero import CheckpointError, ZeroStrategy
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.integrations.trainer import checkpoint_lookup


@pytest.mark.parametrize(
    "strategy", [DDPStrategy(), SingleDeviceStrategy(), ZeroStrategy()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("word", ["last", "best", "a.ckpt"])
def test_where_there_is_no_last_checkpoint_other_strategies_begin_anew(
    strategy: Strategy, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_lookup, "_replace_broken_last", lambda trainer: "another.ckpt")

    def parse(self: Any, state_fn: Any, ckpt_path: Any) -> None:
        """Finds nothing, as Lightning's."""

    found = checkpoint_lookup._find_last(parse)(SimpleNamespace(trainer=SimpleNamespace(strategy=strategy)), None, word)
    ours = isinstance(strategy, ZeroStrategy) and word == "last"
    assert found == ("another.ckpt" if ours else None)


def parsed(strategy: Strategy, path: Path) -> Any:
    trainer = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    return checkpoint_lookup._remember_request(lambda self, state_fn, ckpt_path: ckpt_path)(trainer, None, path)


@pytest.mark.parametrize("strategy", [DDPStrategy(), SingleDeviceStrategy()], ids=lambda s: type(s).__name__)
def test_a_strategy_that_reads_files_names_the_command_for_a_folder(strategy: Strategy, tmp_path: Path) -> None:
    assert parsed(strategy, tmp_path) == tmp_path, "this folder holds no checkpoint, so Lightning reports it"
    (tmp_path / METADATA).touch()
    command = f"python -m lightning_zero checkpoint consolidate {tmp_path}"
    with pytest.raises(CheckpointError, match=f"{type(strategy).__name__} cannot read.*: {command}"):
        parsed(strategy, tmp_path)


@pytest.mark.parametrize(
    "strategy",
    [FSDPStrategy(), ModelParallelStrategy(), ZeroStrategy(), DDPStrategy(checkpoint_io=AsyncCheckpointIO())],
    ids=lambda s: type(s).__name__,
)
def test_a_strategy_that_may_read_folders_gets_them(strategy: Strategy, tmp_path: Path) -> None:
    (tmp_path / METADATA).touch()
    assert parsed(strategy, tmp_path) == tmp_path
