"""Checkpoints are saved, replaced, found and read under any name, and nothing else is made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zero.checkpoint import atomic
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import FileIO
from lightning_zero.integrations.trainer.checkpoint_lookup import other_checkpoints
from tests.helpers.saves import save, seed_of
from tests.helpers.threaded import values_of

NAMES = [
    "sp ace ü %20 #1?.ckpt",
    "[a]*@-~.ckpt",
    "new\nline.ckpt",
    "s3:x.ckpt",
    "a::b.ckpt",
    "d::e/x.ckpt",
    "epoch=1/val/loss=0.5.ckpt",
    f"{'n' * 250}.ckpt",
    f"{'ü' * 125}.ckpt",
]


def _save_file(path: Path, seed: float) -> list[Any]:
    FileIO().save_checkpoint({"seed": seed, "state_dict": values_of(seed)}, path)
    return [None, None]


@pytest.fixture(params=[_save_file, save], ids=["file", "folder"])
def saves(request: pytest.FixtureRequest) -> Callable[[Path, float], list[Any]]:
    found: Callable[[Path, float], list[Any]] = request.param
    return found


@pytest.mark.parametrize("exchanges", [True, False], ids=["one rename", "two renames"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20])
def test_any_name(tmp_path: Path, name: str, exchanges: bool, saves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    path = tmp_path / name
    for seed in (1.0, 2.0):
        assert saves(path, seed) == [None, None]
        assert os.listdir(path.parent) == [path.name]
        assert seed_of(path) == seed
    assert os.listdir(tmp_path) == [name.split("/")[0]]
    assert other_checkpoints(path.parent / "other.ckpt") == [str(path)]


def test_a_name_that_no_file_has_is_named(tmp_path: Path, saves: Any) -> None:
    path = tmp_path / f"{'n' * 295}.ckpt"
    with pytest.raises((OSError, CheckpointError), match=f"File name too long.*{path}"):
        for error in saves(path, 1.0):
            raise error
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EINTR, errno.EIO])
@pytest.mark.parametrize("over", [False, True], ids=["a new place", "over another"])
def test_a_rename_that_fails_leaves_what_stood_there(tmp_path: Path, number: int, over: bool, saves: Any) -> None:
    path = tmp_path / "x.ckpt"
    if over:
        saves(path, 1.0)

    def fails(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    hindered = patch.object(atomic, "exchange", fails), patch.object(os, "rename", fails)
    with hindered[0], hindered[1], pytest.raises((OSError, CheckpointError), match=os.strerror(number)):
        for error in saves(path, 2.0):
            raise error
    assert seed_of(path) == (1.0 if over else None)
    assert saves(path, 3.0) == [None, None]
    assert seed_of(path) == 3.0
    assert os.listdir(tmp_path) == ["x.ckpt"]
