"""A second checkpoint of a state that was just saved: its files are links, and it outlives the first."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.commit import fingerprint, relink_save, relink_target
from lightning_zero.checkpoint.sharded.folder import LocalFolder
from lightning_zero.checkpoint.sharded.planner import serialize
from lightning_zero.errors import CheckpointError
from tests.helpers.damage import cut
from tests.helpers.save_points import killed_everywhere
from tests.helpers.saves import save, seed_of
from tests.helpers.threaded import sharded_state

REST = serialize({"seed": 1.0, "which": "second"})


def _linked(one: Path, other: Path) -> bool:
    return all((one / name).samefile(other / name) for name in ("__0_0.distcp", "__1_0.distcp"))


@pytest.mark.parametrize("over", [None, "first", "another"])
def test_it_is_whole_without_the_first(tmp_path: Path, over: str | None) -> None:
    first, second = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(first, 1.0)
    if over is not None:
        save(second, 2.0)
    assert relink_save(str(first), str(second), REST)
    assert _linked(first, second)
    shutil.rmtree(first)
    assert seed_of(second) == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def _no_links(*_: Any) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("may_copy", [True, False])
def test_where_there_are_no_links(tmp_path: Path, may_copy: bool) -> None:
    first, second = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(first, 1.0)
    with patch.object(os, "link", _no_links):
        assert relink_save(str(first), str(second), REST, may_copy) == may_copy
    assert seed_of(second) == (1.0 if may_copy else None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == (["last.ckpt"] if may_copy else []) + ["x.ckpt"]
    assert not may_copy or not _linked(first, second)


@pytest.mark.parametrize("fault", ["no space", "a damaged first"])
def test_where_it_fails_all_is_as_it_was(tmp_path: Path, fault: str) -> None:
    first, second = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(first, 1.0)
    save(second, 2.0)
    if fault == "a damaged first":
        cut(first / ".metadata", 0.5)
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(LocalFolder, "create", side_effect=full), pytest.raises((OSError, CheckpointError)):
        relink_save(str(first), str(second), REST)
    assert seed_of(second) == 2.0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "x.ckpt"]


def test_places(tmp_path: Path) -> None:
    assert relink_target(tmp_path / "last.ckpt", str(tmp_path / "x.ckpt")) == str(tmp_path / "last.ckpt")
    assert relink_target(tmp_path / "x.ckpt", str(tmp_path / "x.ckpt")) is None, "it would take itself away"
    assert relink_target("memory://last.ckpt", str(tmp_path / "x.ckpt")) is None


def test_fingerprints_tell_states_apart() -> None:
    def given(**other: Any) -> tuple[Any, ...]:
        return fingerprint(state | {"buffer": torch.arange(3), "lr": 0.1} | other, 0)

    state = sharded_state(0, 2, 1.0)
    assert given() == given()
    elsewhere = sharded_state(0, 2, 1.0)
    part: CheckpointShard = elsewhere["state_dict"]["up.weight"]
    for other in ({"buffer": torch.arange(1, 4)}, {"lr": 0.2}, {"new": 1}, {"state_dict": {"up.weight": part}}):
        assert given(**other) != given(), other


def test_whoever_dies_meanwhile_leaves_the_last_one_or_the_new_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save(home / "x.ckpt", 1.0)
    save(home / "last.ckpt", 2.0)
    copies = killed_everywhere(home, lambda: relink_save(str(home / "x.ckpt"), str(home / "last.ckpt"), REST))
    found = [seed_of(copy / "last.ckpt") for copy in copies.values()]
    assert len(found) > 10
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found, reverse=True), "the new checkpoint was there, and then not"
