"""A checkpoint replaces another one, and no other files of a user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.errors import CheckpointError
from tests.helpers.damage import cut
from tests.helpers.elsewhere import stored
from tests.helpers.saves import save, save_file, seed_of


def _file(path: Path, seed: float) -> list[Any]:
    try:
        return [save_file(path, seed)]
    except CheckpointError as error:
        return [error]


KINDS: dict[str, Callable[[Path, float], list[Any]]] = {"sharded": save, "full": _file}


def _runs(path: Path) -> None:
    (path / "version_0").mkdir(parents=True)
    (path / "version_0" / "hparams.yaml").write_text("lr: 1")
    (path / "notes.txt").write_text("of months")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    _runs(tmp_path / "run")
    errors = KINDS[kind](tmp_path / "run", 1.0)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"{tmp_path / 'run'} is a folder without a checkpoint: it holds 'notes.txt', 'version_0'" in str(error)
        assert str(error) == str(errors[0])
    assert (tmp_path / "run" / "version_0" / "hparams.yaml").read_text() == "lr: 1"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def _of_deepspeed(path: Path) -> None:
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"")


def _of_others(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"")
    (path / "__0_0.distcp").write_bytes(b"")


def _in_ruins(path: Path) -> None:
    save(path, 1.0)
    for name in (".metadata", "manifest.json", "meta.pt", "__0_0.distcp"):
        (path / name).unlink()
    cut(path / "__1_0.distcp", 0.5)


def _a_link(path: Path) -> None:
    _runs(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


BEFORE: dict[str, Callable[[Path], object]] = {
    "an empty folder": Path.mkdir,
    "DeepSpeed's": _of_deepspeed,
    "others'": _of_others,
    "what is left of one": _in_ruins,
    "a link": _a_link,
    "a file": lambda path: path.write_text("anything"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", BEFORE)
def test_what_was_a_checkpoint_gives_way(tmp_path: Path, kind: str, before: str) -> None:
    path = tmp_path / "x.ckpt"
    BEFORE[before](path)
    assert KINDS[kind](path, 2.0) == [None] * (2 if kind == "sharded" else 1)
    assert seed_of(path) == 2.0
    assert not path.is_symlink()
    if before == "a link":
        assert (tmp_path / "elsewhere" / "notes.txt").read_text() == "of months", "what a link leads to stays"


def test_in_an_object_store_too() -> None:
    with stored():
        with fsspec.open("memory://bucket/run/notes.txt", "w") as file:
            file.write("of months")
        for error in save("memory://bucket/run", 1.0):  # type: ignore[arg-type]
            assert "is a folder without a checkpoint: it holds 'notes.txt'" in str(error)
        assert list(MemoryFileSystem.store) == ["/bucket/run/notes.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_runs_may_hold_one_that_is_called_latest(tmp_path: Path, kind: str) -> None:
    for name in ("latest", "checkpoint", "of months"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for error in KINDS[kind](tmp_path / "run", 1.0):
        assert "is a folder without a checkpoint: it holds 'checkpoint', 'latest', 'of months'" in str(error)
    assert len(list((tmp_path / "run").iterdir())) == 3
