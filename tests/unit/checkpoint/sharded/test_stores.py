"""Sharded checkpoints in real object stores: lists may be old, and names may look like patterns."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.config import conf

from lightning_zero.checkpoint.async_save.snapshot import SnapshotMemory
from lightning_zero.checkpoint.async_save.writer_process import WriteRequest, fsspec_settings, serve
from lightning_zero.checkpoint.remote_files import resolve_url
from lightning_zero.checkpoint.sharded.folder import MANIFEST, RemoteFolder, remove_checkpoint_at
from lightning_zero.checkpoint.sharded.planner import PickledItem
from lightning_zero.checkpoint.sharded.reader import CheckpointReader
from lightning_zero.checkpoint.sharded.writer import RankFiles
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.trainer.checkpoint_lookup import other_checkpoints
from lightning_zero.sharding.shared_memory import Claim
from tests.helpers.saves import save, seed_of
from tests.helpers.store import Store, storing

PATH = "stored://run/x.ckpt"


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    with storing():
        yield


def _list_all() -> None:
    """This thread remembers it."""
    fs = fsspec.filesystem("stored")
    fs.invalidate_cache()
    for path, _, _ in fs.walk("run"):
        fs.ls(path)
    assert "run" in fs.dircache


def _names() -> list[str]:
    return sorted({name.split("/")[1] for name in Store.objects})


def test_what_others_have_written_since_a_list_was_made_is_read() -> None:
    save(PATH, 1.0)
    _list_all()
    assert save(PATH, 22.0, world_size=3) == [None] * 3
    assert seed_of(PATH) == 22.0
    _list_all()
    save("stored://run/y.ckpt", 3.0)
    assert other_checkpoints(PATH) == ["stored://run/y.ckpt"]
    assert seed_of("stored://run/y.ckpt") == 3.0
    _list_all()
    threading.Thread(target=lambda: remove_checkpoint_at("stored://run/y.ckpt")).start()
    remove_checkpoint_at("stored://run/z.ckpt")
    save("stored://run/z.ckpt", 4.0)
    remove_checkpoint_at("stored://run/z.ckpt")
    assert _names() == ["x.ckpt"]


def test_names_are_no_patterns() -> None:
    names = ["x1.ckpt", "x[1].ckpt", "xx.ckpt", "x*.ckpt", "x?.ckpt"]
    for seed in (1.0, 2.0):
        for name in names:
            assert save(f"stored://run/{name}", seed) == [None, None]
    for name in ("x[1].ckpt", "x*.ckpt", "x?.ckpt"):
        remove_checkpoint_at(f"stored://run/{name}")
        names.remove(name)
        assert _names() == sorted(names)
    assert [seed_of(f"stored://run/{name}") for name in names] == [2.0, 2.0]


def test_a_list_that_lacks_files_loses_none() -> None:
    """A file that is copied to its place is then removed from its first place."""
    save(PATH, 1.0)

    def lacking(
        self: Store, path: str, detail: bool = True, real: Callable[..., Any] = Store.ls, **options: Any
    ) -> Any:
        found = [one for one in real(self, path, detail=True) if not one["name"].endswith(("__1_0.distcp", MANIFEST))]
        return found if detail else [one["name"] for one in found]

    with patch.object(Store, "ls", lacking):
        assert save(PATH, 2.0) == [None, None]
    assert seed_of(PATH) == 2.0


def test_a_file_that_was_not_read_before_its_place_was_taken_is_not_read() -> None:
    """Rank 1's first look is after another save, with values of the same sizes."""
    save(PATH, 1.0)
    folder = CheckpointReader(PATH)
    value = folder.state()["state_dict"]["down.weight"]
    read = next(read for _, read in value.chunks if read.args[0].relative_path == "__1_0.distcp")
    save(PATH, 2.0)
    with pytest.raises(CheckpointError, match=r"x\.ckpt was replaced by another one while it was being loaded"):
        read()
    assert seed_of(PATH) == 2.0


def test_one_that_has_lost_its_place_to_a_save_that_died_is_found() -> None:
    """It is complete next to its place, which is empty now."""
    save("stored://run/a.ckpt", 1.0)
    save(PATH, 2.0)

    def dies(*args: Any, **options: Any) -> None:
        raise OSError("throttled")

    with patch.object(Store, "cp_file", dies):
        errors = save(PATH, 3.0)
    assert all("throttled" in str(error) for error in errors)
    assert _names() == ["a.ckpt", "x.ckpt.incomplete"]
    assert other_checkpoints("stored://run/last.ckpt") == [PATH, "stored://run/a.ckpt"]
    assert seed_of(PATH) == 3.0
    remove_checkpoint_at(PATH)
    assert _names() == ["a.ckpt"]


def test_a_writer_reaches_what_the_program_has_set_up(tmp_path: Path) -> None:
    """Keys, or the address of a store: a process of its own has the environment's values only."""
    (tmp_path / "run").mkdir()
    claim, replies = Claim.of(64), io.BytesIO()
    with set_up("dir", path=str(tmp_path), target_protocol="file"), set_up("other", session=threading.Lock()):
        RemoteFolder(*resolve_url("dir://run/x.ckpt")).begin("a save")
        memory = SnapshotMemory(claim.path, claim.identity, 64)
        order = WriteRequest(
            "dir://run/x.ckpt", "a save", 0, memory, [PickledItem(("a",), b"some bytes")], fsspec_settings()
        )
    try:
        serve(io.BytesIO(pickle.dumps(order)), replies)
    finally:
        conf.pop("dir", None)
        claim.release()
    reply = pickle.loads(replies.getvalue())
    assert isinstance(reply, RankFiles), reply
    assert (tmp_path / "run" / "x.ckpt" / "__0_0.distcp").read_bytes() == b"some bytes"


@contextmanager
def set_up(protocol: str, **settings: Any) -> Iterator[None]:
    conf[protocol] = settings
    yield
    del conf[protocol]
