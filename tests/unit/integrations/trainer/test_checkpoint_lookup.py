"""Test that patches of Lightning change nothing for other strategies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lightning_zero import ZeroStrategy
from lightning_zero.cli.main import main
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.trainer import checkpoint_lookup
from tests.helpers.folders import write_folder


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


def test_a_strategy_that_reads_files_names_the_command_for_a_sharded_checkpoint(tmp_path: Path) -> None:
    write_folder(tmp_path / "x.ckpt")
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(CheckpointError) as caught:
        trainer.validate(BoringModel(), ckpt_path=str(tmp_path / "x.ckpt"), weights_only=False)
    message = str(caught.value)
    command = message.split("`")[1].split()
    assert "SingleDeviceStrategy cannot read" in message
    assert main(command[1:]) == 0
    assert message.split("'")[1] == f"{tmp_path / 'x.ckpt'}.consolidated"
    assert Path(message.split("'")[1]).is_file()
