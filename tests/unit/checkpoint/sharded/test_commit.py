"""A save that dies at any point leaves the earlier or the new checkpoint, complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.integrity import verify_archive
from lightning_zero.errors import CheckpointError
from tests.helpers.save_points import killed_everywhere
from tests.helpers.saves import save, save_file, seed_of

KINDS: dict[str, Callable[[Path, float], Any]] = {"sharded": save, "full": save_file}
NAMED = {  # a save without these is another one than this test is about
    "sharded": ["after make folders", "after begin", "before create __0_0.distcp", "after create __1_0.distcp"]
    + ["after write __1_0.distcp", "before fsync __0_0.distcp", "after finish __1_0.distcp", "after create meta.pt"]
    + ["after fsync meta.pt", "after create .metadata", "after write .metadata", "after finish .metadata"]
    + ["after create manifest.json", "after write manifest.json", "after finish manifest.json", "before commit"]
    + ["after unlink .save_id", "after sync x.ckpt.incomplete", "after sync home", "after commit"],
    "full": ["after make folders", "after write x.ckpt.incomplete"]
    + ["before fsync x.ckpt.incomplete", "after fsync x.ckpt.incomplete", "after sync home"],
}


@pytest.mark.parametrize("exchanges", [True, False], ids=["one rename", "two renames"])
@pytest.mark.parametrize("before", [None, "sharded", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive_variants("sharded-sharded-two renames")
def test_a_save_that_dies_leaves_the_last_checkpoint_or_the_new_one(
    tmp_path: Path, kind: str, before: str | None, exchanges: bool
) -> None:
    home, path = tmp_path / "home", tmp_path / "home" / "x.ckpt"
    home.mkdir()
    if before is not None:
        KINDS[before](path, 1.0)
    real = atomic.exchange
    with patch.object(atomic, "exchange", lambda one, other: exchanges and real(one, other)):
        copies = killed_everywhere(home, lambda: KINDS[kind](path, 2.0))
    for name in NAMED[kind]:
        assert any(copy.endswith(name) for copy in copies), f"no longer a point: {name}; there are {list(copies)}"
    old, found = None if before is None else 1.0, []
    for name, copy in copies.items():
        found.append(seed_of(copy / "x.ckpt"))
        assert found[-1] in (old, 2.0), name
    last = {"sharded": "before finish manifest.json", "full": "before finish x.ckpt.incomplete"}[kind]
    unfinished = list(copies)[: next(number for number, name in enumerate(copies) if name.endswith(last)) - 1]
    for part in (copies[name] / "x.ckpt.incomplete" for name in unfinished):
        if part.exists():
            with pytest.raises(CheckpointError, match=r"x\.ckpt\.incomplete"):
                seed_of(part)
    assert found == sorted(found, key=lambda seed: seed == 2.0), "the new checkpoint was there, and then not"
    assert found[-1] == 2.0
    assert [entry.name for entry in home.iterdir()] == ["x.ckpt"]


def test_the_next_save_clears_up(tmp_path: Path) -> None:
    home, path = tmp_path / "home", tmp_path / "home" / "x.ckpt"
    home.mkdir()
    save(path, 1.0)
    with patch.object(atomic, "exchange", lambda one, other: False):
        copies = killed_everywhere(home, lambda: save(path, 2.0))
    for name, copy in list(copies.items())[::3]:
        assert save(copy / "x.ckpt", 3.0) == [None, None], name
        assert seed_of(copy / "x.ckpt") == 3.0
        assert [entry.name for entry in copy.iterdir()] == ["x.ckpt"], name


def test_a_file_that_is_written_is_not_damaged(tmp_path: Path) -> None:
    save_file(tmp_path / "x.ckpt", 1.0)
    verify_archive(tmp_path / "x.ckpt")
