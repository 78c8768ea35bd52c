"""Full checkpoints at URLs: streams, which leave the earlier file until all is written."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.folder import MANIFEST
from lightning_zero.checkpoint.sharded.reader import checkpoint_kind
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import FileIO, load_file
from tests.helpers.elsewhere import mount
from tests.helpers.store import Store, storing


class Bad:
    """It cannot be saved, which shows when half of the file is written."""

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


@pytest.fixture(params=["memory", "mounted", "stored"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    MemoryFileSystem.store.clear()
    mount(tmp_path)
    with storing():
        yield f"{request.param}://run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def _there(url: str) -> bytes:
    if url.startswith("stored"):
        return Store.objects[url.removeprefix("stored://")]
    with fsspec.open(url, "rb") as file:
        return bytes(file.read())


def _names(root: str) -> list[str]:
    if root.startswith("stored"):
        return [name.rsplit("/", 1)[-1] for name in Store.objects]
    fs, place = fsspec.core.url_to_fs(root)
    return [entry.rsplit("/", 1)[-1] for entry in fs.ls(place, detail=False)]


def _save(url: str, value: Any) -> None:
    FileIO().save_checkpoint({"state_dict": {"w": torch.arange(1e6)}, "value": value}, url)


def test_one_takes_the_place_of_another_once_it_is_whole(root: str) -> None:
    url = f"{root}/a b%20ü.ckpt"
    for value in (1, 2):
        _save(url, value)
        found = torch.load(io.BytesIO(_there(url)))
        assert found["value"] == value
        assert torch.equal(found["state_dict"]["w"], torch.arange(1e6))
    before = _there(url)
    with pytest.raises(ValueError, match="not this one"):
        _save(url, Bad())
    assert _there(url) == before
    assert _names(root) == ["a b%20ü.ckpt"]


def test_an_upload_that_fails_half_way_leaves_the_old_object() -> None:
    url = "stored://run/x.ckpt"
    with storing():
        _save(url, 1)
        before, Store.fails_after = _there(url), 1
        with pytest.raises(OSError, match="throttled"):
            _save(url, 2)
        assert _there(url) == before


def test_one_takes_the_place_of_a_folder(root: str) -> None:
    """In an object store both may be there at once."""
    url = f"{root}/x.ckpt"
    for name in (".metadata", "__0_0.distcp", "deeper/one"):
        fsspec.core.url_to_fs(url)[0].makedirs(f"{fsspec.core.url_to_fs(url)[1]}/deeper", exist_ok=True)
        with fsspec.open(f"{url}/{name}", "wb") as file:
            file.write(b"of a folder")
    _save(url, 1)
    assert torch.load(io.BytesIO(_there(url)))["value"] == 1
    assert _names(root) == ["x.ckpt"]
    assert load_file(FileIO(), url, None)["value"] == 1


@pytest.mark.parametrize("complete", [False, True])
def test_what_a_killed_sharded_save_has_left_beside_is_neither_in_the_way_nor_believed(
    root: str, complete: bool
) -> None:
    """A complete one is read in place of the earlier one, until it is moved."""
    url, left = f"{root}/x.ckpt", f"{root}/x.ckpt.incomplete"
    _save(url, 1)
    save_sharded(left, {"state_dict": {"w": torch.ones(3)}}, {}, SingleProcess())
    if not complete:
        fs, place = fsspec.core.url_to_fs(left)
        fs.rm_file(f"{place}/{MANIFEST}")
    assert checkpoint_kind(url) == ("folder" if complete else "file")
    _save(url, 2)
    assert checkpoint_kind(url) == "file"
    assert load_file(FileIO(), url, None)["value"] == 2
    assert _names(root) == ["x.ckpt"]


def test_a_file_is_read_though_something_is_left_of_the_folder_whose_place_it_took() -> None:
    url = "stored://run/x.ckpt"
    with storing():
        save_sharded(url, {"state_dict": {"w": torch.ones(3)}}, {}, SingleProcess())
        left = dict(list(Store.objects.items())[:2])
        _save(url, 1)
        Store.objects.update(left)  # who wrote it was killed
        Store.versions.update(dict.fromkeys(left, 0))
        assert checkpoint_kind(url) == "file"
        assert load_file(FileIO(), url, None)["value"] == 1
        _save(url, 2)
        assert load_file(FileIO(), url, None)["value"] == 2
        assert list(Store.objects) == ["run/x.ckpt"]


def test_names_are_no_patterns(root: str) -> None:
    names = ["x1.ckpt", "x[1].ckpt", "xx.ckpt", "x*.ckpt", "x?.ckpt"]
    for value in (1, 2):
        for name in names:
            _save(f"{root}/{name}", value)
    assert sorted(_names(root)) == sorted(names)
    for name in ("x[1].ckpt", "x*.ckpt", "x?.ckpt"):
        FileIO().remove_checkpoint(f"{root}/{name}")
        names.remove(name)
        assert sorted(_names(root)) == sorted(names)
    assert all(torch.load(io.BytesIO(_there(f"{root}/{name}")))["value"] == 2 for name in names)


def test_what_others_write_meanwhile_is_not_held_back(root: str) -> None:
    """As a logger does, in another thread."""
    fs, place = fsspec.core.url_to_fs(f"{root}/log")
    seen = []

    class Looks:
        def __reduce__(self) -> Any:
            def log() -> None:
                with fs.open(place, "wb") as file:
                    file.write(b"a line")
                seen.append(_there(f"{root}/log"))

            thread = threading.Thread(target=log)
            thread.start()
            thread.join()
            return int, ()

    _save(f"{root}/x.ckpt", Looks())
    assert seen[0] == b"a line"


def test_it_takes_the_place_of_a_checkpoint_only(tmp_path: Path) -> None:
    mount(tmp_path)
    for name, kept in (("data", "numbers.csv"), ("x.ckpt", ".metadata")):
        (tmp_path / name).mkdir()
        (tmp_path / name / kept).touch()
    with pytest.raises(CheckpointError, match="is a folder without a checkpoint: it holds 'numbers.csv'"):
        _save("mounted://data", 1)
    _save("mounted://x.ckpt", 1)
    assert torch.load(tmp_path / "x.ckpt")["value"] == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "x.ckpt"]
