"""A save that fails on one rank fails on all of them with the same words, and leaves all as it was."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.full_checkpoint import write_local_file
from lightning_zero.checkpoint.sharded import commit, folder, reader
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.folder import LocalFolder
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import read_on_all_ranks
from tests.helpers.saves import save, save_file, seed_of
from tests.helpers.threaded import checkpoints_of, on_ranks, sharded_state

WORLD = 2


class _Full:
    """A file on a disk that has room for some more bytes only."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room, self.name = file, room, file.name

    def write(self, data: Any) -> int:
        count = min(self.room, len(data))
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= count
        return self.file.write(data[:count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def full_disk(name: str, room: int) -> AbstractContextManager[Any]:
    create = LocalFolder.create
    return patch.object(
        LocalFolder,
        "create",
        lambda self, other: _Full(create(self, other), room) if other == name else create(self, other),
    )


@contextmanager
def size_limit(room: int) -> Iterator[None]:
    """Return all files that this process writes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def failing(owner: Any, name: str, error: BaseException, when: Callable[..., bool] = lambda *_: True) -> Any:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise error
        return original(*args, **kwargs)

    return patch.object(owner, name, call)


NO_SPACE, NO_RIGHT = (
    OSError(errno.ENOSPC, "No space left on device"),
    PermissionError(errno.EACCES, "Permission denied"),
)
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    **{
        f"{room} bytes are left for {name}": (lambda name=name, room=room: full_disk(name, room), "No space left")
        for name in ("__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "manifest.json")
        for room in (0, 70)
    },
    "a limit": (lambda: size_limit(2000), "File too large"),
    "no folder can be made": (lambda: failing(Path, "mkdir", NO_SPACE), "No space left"),
    "no token": (lambda: failing(Path, "write_text", NO_SPACE), "No space left"),
    "nothing reaches the disk": (
        lambda: failing(os, "fsync", OSError(errno.EIO, "Input/output error")),
        "Input/output",
    ),
    "no rename": (lambda: failing(os, "rename", NO_RIGHT), "Permission denied"),
    "another file system": (
        lambda: failing(os, "rename", OSError(errno.EXDEV, "Invalid cross-device link")),
        "(Invalid cross-device link): one of them is on another file system",
    ),
    "a piece that is none": (
        lambda: failing(torch, "save", TypeError("cannot pickle '_thread.lock'")),
        "cannot pickle",
    ),
    "no memory": (lambda: failing(torch, "save", MemoryError("of the host")), "MemoryError: of the host"),
    "a bug": (lambda: failing(commit, "plan_items", KeyError("x"), lambda _, rank: rank == 1), "rank 1: KeyError: 'x'"),
}


@pytest.mark.parametrize("exchanges", [True, False], ids=["one rename", "two renames"])
@pytest.mark.parametrize("over", [False, True], ids=["a new place", "over another"])
@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_say_the_same_and_nothing_has_changed(tmp_path: Path, name: str, over: bool, exchanges: bool) -> None:
    if name in ("no rename", "another file system") and over and exchanges:
        pytest.skip("nothing is renamed")
    path = tmp_path / "x.ckpt"
    if over:
        save(path, 1.0)
    real = atomic.exchange
    fault, said = FAULTS[name]
    with patch.object(atomic, "exchange", lambda one, other: exchanges and real(one, other)), fault():
        errors = save(path, 2.0)
    for error in errors:
        assert type(error) is CheckpointError, repr(error)
        assert said in str(error)
        assert f"save a checkpoint to {path}" in str(error)
        assert str(error) == str(errors[0])
    assert seed_of(path) == (1.0 if over else None)
    assert [entry.name for entry in tmp_path.iterdir()] == (["x.ckpt"] if over else [])
    assert save(path, 3.0) == [None, None], "the next one is not hindered"
    assert seed_of(path) == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


def test_what_cannot_be_removed_at_last_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1.0)

    def at_last(target: Path) -> bool:
        return target.exists()

    with failing(atomic, "remove", NO_RIGHT, at_last):
        assert save(path, 2.0) == [None, None]
    assert seed_of(path) == 2.0
    assert save(path, 3.0) == [None, None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


def _read_only(home: Path) -> Any:
    return failing(Path, "mkdir", PermissionError(errno.EROFS, "Read-only file system"))


def _file_for_a_folder(home: Path) -> Any:
    (home / "runs").write_text("a file")
    return nullcontext()


@pytest.mark.parametrize(
    ("hinder", "said"), [(_read_only, "Read-only file system"), (_file_for_a_folder, "FileExistsError|NotADirectory")]
)
def test_places_where_nothing_can_be_made(tmp_path: Path, hinder: Any, said: str) -> None:
    for target in ("x.ckpt", "deeper/x.ckpt"):
        path = tmp_path / "runs" / target
        with hinder(tmp_path):
            errors = save(path, 1.0)
        for error in errors:
            assert isinstance(error, CheckpointError)
            assert any(word in str(error) for word in said.split("|")), str(error)
            assert str(error) == str(errors[0])


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    assert save(tmp_path / "a" / "b" / "x.ckpt", 1.0) == [None, None]
    assert seed_of(tmp_path / "a" / "b" / "x.ckpt") == 1.0


def on_hosts(attempt: Callable[[Any], Any], owner: Any, name: str, other: Callable[..., Any]) -> list[Any]:
    """Replace an attribute of ``owner`` by ``other``, on rank 1 only."""
    here, real = threading.local(), getattr(owner, name)

    def one(together: Any) -> Any:
        here.rank = together.rank
        return attempt(together)

    def call(*args: Any) -> Any:
        return (other if here.rank == 1 else real)(*args)

    with patch.object(owner, name, call):
        return on_ranks(WORLD, one)


def test_a_rank_that_sees_no_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1.0)

    def attempt(together: Any) -> None:
        save_sharded(path, sharded_state(together.rank, WORLD, 2.0), {}, together)

    with patch.object(atomic, "VISIBLE_TIMEOUT_S", 0.1):
        errors = on_hosts(attempt, LocalFolder, "sees", lambda self, token: False)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "rank 1: this rank does not see the folder that rank 0 has made" in str(error)
        assert "state_dict_type='full'" in str(error)
    assert seed_of(path) == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


def _late(owner: Any, name: str, before: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return ``before`` the first three times, as a client with a cache does."""
    real, asked = getattr(owner, name), []

    def late(*args: Any) -> Any:
        asked.append(args)
        return before if len(asked) <= 3 else real(*args)

    return late, asked


def test_what_shows_late_on_a_rank_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    def write(together: Any) -> None:
        save_sharded(path, sharded_state(together.rank, WORLD, 2.0), {"seed": 2.0}, together)

    late, asked = _late(LocalFolder, "sees", False)
    assert on_hosts(write, LocalFolder, "sees", late) == [None, None]
    assert len(asked) == 4
    assert seed_of(path) == 2.0

    late, asked = _late(reader, "readable_location", reader.readable_location(str(tmp_path / "nothing")))
    found = on_hosts(lambda together: checkpoints_of(together).is_folder(path), reader, "readable_location", late)
    assert found == [True, True]
    assert len(asked) == 4


def test_what_a_rank_never_sees_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1.0)
    with patch.object(atomic, "VISIBLE_TIMEOUT_S", 0.1):
        nothing = reader.readable_location(str(tmp_path / "nothing"))
        errors = on_hosts(
            lambda together: checkpoints_of(together).is_folder(path),
            reader,
            "readable_location",
            lambda given: nothing,
        )
    for error in errors:
        assert f"Ranks see different things at {path}: folder on rank 0, nothing on rank 1" in str(error)


def test_a_rank_in_another_folder_writes_to_rank_0s(tmp_path: Path) -> None:
    def attempt(together: Any) -> None:
        save_sharded("x.ckpt", sharded_state(together.rank, WORLD, 2.0), {"seed": 2.0}, together)

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        (tmp_path / "elsewhere").mkdir()
        real = folder.full_path
        elsewhere = str(tmp_path / "elsewhere")
        assert on_hosts(attempt, commit, "full_path", lambda path: real(f"{elsewhere}/{path}")) == [None, None]
    finally:
        os.chdir(before)
    assert seed_of(tmp_path / "x.ckpt") == 2.0


@pytest.mark.parametrize("seen", ["another save", "another's", "nothing"])
def test_ranks_that_see_different_things_say_so(tmp_path: Path, seen: str) -> None:
    path, other = tmp_path / "x.ckpt", tmp_path / "other.ckpt"
    save(path, 1.0)
    if seen == "another save":
        save(other, 2.0)
    elif seen == "another's":
        dcp.save({"state_dict": {}}, checkpoint_id=other, no_dist=True)
    real = reader.readable_location

    def attempt(together: Any) -> None:
        read_on_all_ranks(checkpoints_of(together), path, None)

    for error in on_hosts(attempt, reader, "readable_location", lambda given: real(str(other))):
        assert isinstance(error, CheckpointError)
        assert "rank 1" in str(error)
        assert str(path) in str(error)


# -- one file


@pytest.mark.parametrize("over", [None, "file", "folder"])
@pytest.mark.parametrize("fault", ["no space", "cannot be pickled", "disk", "no rename"])
def test_a_file_that_cannot_be_written_leaves_what_stood_there(tmp_path: Path, fault: str, over: str | None) -> None:
    path = tmp_path / "x.ckpt"
    if over is not None:
        save_file(path, 1.0) if over == "file" else save(path, 1.0)
    faults: dict[str, tuple[Any, type[Exception]]] = {
        "no space": (size_limit(1000), OSError),
        "cannot be pickled": (nullcontext(), TypeError),
        "disk": (failing(os, "fsync", OSError(errno.EIO, "Input/output error")), OSError),
        "no rename": (failing(os, "rename", NO_RIGHT), PermissionError),
    }
    hindered, kind = faults[fault]
    content = {"lock": threading.Lock()} if fault == "cannot be pickled" else {"x": torch.ones(1000)}
    no_exchange = patch.object(atomic, "exchange", lambda one, other: False)
    if fault == "no rename" and over == "file":
        pytest.skip("one file takes another's place by another call")
    with no_exchange, hindered, pytest.raises(kind):
        write_local_file(content, path)
    assert seed_of(path) == (None if over is None else 1.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if over is None else ["x.ckpt"])
    save_file(path, 3.0)
    assert seed_of(path) == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]
