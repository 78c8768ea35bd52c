"""A program that goes to another folder while a checkpoint is written, or is to be removed, leads neither astray."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.integrations.checkpoint_files import BackgroundFileIO
from tests.helpers.saves import save_file


def test_a_file_that_is_written_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_file(tmp_path / "old.ckpt", 0.0)
    go_on, real = threading.Event(), BackgroundFileIO._save

    def later(self: Any, *args: Any) -> None:
        assert go_on.wait(20)
        real(self, *args)

    monkeypatch.setattr(BackgroundFileIO, "_save", later)
    monkeypatch.chdir(tmp_path)
    io = BackgroundFileIO()
    io.save_checkpoint({"seed": 1.0, "state_dict": {}}, "new.ckpt")
    io.remove_checkpoint("old.ckpt")
    assert io.busy
    os.chdir("elsewhere")
    go_on.set()
    io.teardown()
    assert not io.busy
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "new.ckpt"]
    assert not list((tmp_path / "elsewhere").iterdir())
