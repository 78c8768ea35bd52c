"""Two trainings that save to the same place.

A checkpoint that stands there is always a whole one, of one of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import (
    INCOMPLETE,
    REPLACED,
    PinnedDirectory,
    remove,
    removing_leftover,
    sibling_path,
)
from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.safetensors import ExportWeight, export_weights
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.folder import LocalFolder, RemoteFolder, save_folder_at
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import read_folder
from tests.helpers.elsewhere import stored
from tests.helpers.save_points import observed
from tests.helpers.saves import save_file, seed_of
from tests.helpers.threaded import on_ranks, sharded_state


def _folder(path: Path, seed: float) -> None:
    """Save by one rank: its points have one order."""
    [error] = on_ranks(
        1, lambda together: save_sharded(path, sharded_state(0, 1, seed), {"seed": seed}, together) and None
    )
    if error is not None:
        raise error


def _begin_folder(path: Path) -> None:
    """As one that is killed a moment later."""
    save_folder_at(path).begin("another save")
    (sibling_path(path, INCOMPLETE) / "__0_0.distcp").write_bytes(b"half")


def _begin_file(path: Path) -> None:
    remove(sibling_path(path, INCOMPLETE))
    sibling_path(path, INCOMPLETE).write_bytes(b"half")


SAVES: dict[str, Callable[[Path, float], None]] = {"sharded": _folder, "full": save_file}
BEGINS: dict[str, Callable[[Path], None]] = {"sharded": _begin_folder, "full": _begin_file}
STRIDES = {"sharded": 7, "full": 2}
TAKEN_UNSEEN = ("before rename", "before exchange")  # between the last look and the rename, which is one call


def _points(home: Path, save: Callable[[], None], at: int, meanwhile: Callable[[], None]) -> tuple[str, Any]:
    """Saves, and at that point something else happens; its name, and how the save ended."""
    seen: list[str] = []
    inside: list[bool] = []

    def reach(point: str) -> None:
        if not inside:
            seen.append(point)
            if len(seen) - 1 == at:
                inside.append(True)
                meanwhile()
                inside.clear()

    error = None
    with observed(reach):
        try:
            save()
        except (CheckpointError, OSError) as caught:
            error = caught
    return (seen[at] if at < len(seen) else ""), error


@pytest.mark.parametrize("whole", [True, False], ids=["saves", "has begun"])
@pytest.mark.parametrize("kind", SAVES)
def test_another_one_comes_at_any_point(tmp_path: Path, kind: str, whole: bool) -> None:
    ends = set()
    for at in range(0, 200, STRIDES[kind]):
        home = tmp_path / str(at)
        path = home / "x.ckpt"
        home.mkdir()
        SAVES[kind](path, 1.0)

        others: list[Exception | None] = []

        def meanwhile(path: Path = path, others: list[Exception | None] = others) -> None:
            others.append(_tried(lambda: SAVES[kind](path, 3.0) if whole else BEGINS[kind](path)))

        point, error = _points(home, lambda path=path: SAVES[kind](path, 2.0), at, meanwhile)
        if not point:
            break
        if point.startswith(TAKEN_UNSEEN):
            continue
        found = seed_of(path)
        [other] = others
        assert error is None or other is None, f"{point}: both have failed: {error}; {other}"
        if whole:
            assert found in [seed for seed, end in ((2.0, error), (3.0, other)) if end is None], point
        else:
            assert found == (2.0 if error is None else 1.0), point
        for end in (error, other):
            assert end is None or re.search(r"another save to \S*x\.ckpt", str(end)), point
        ends.add((found, error is None, other is None))
        SAVES[kind](path, 4.0)
        assert seed_of(path) == 4.0, point
    else:
        pytest.fail("never came to an end")
    assert at > 16
    if whole or kind == "sharded":
        assert (2.0, True, False) in ends, "no other one is ever refused"


def _tried(attempt: Callable[[], object]) -> Exception | None:
    try:
        attempt()
    except CheckpointError as error:
        return error
    return None


def test_a_second_one_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    first = save_folder_at(path)
    first.begin("one")
    for save in SAVES.values():
        with pytest.raises(
            CheckpointError, match=r"another save to .*x\.ckpt is running, and this one has written nothing"
        ):
            save(path, 2.0)
    first.discard()
    _folder(path, 2.0)
    assert seed_of(path) == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none."""

    def fails(number: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fails)


def test_the_one_that_was_too_late_leaves_the_other_alone(tmp_path: Path, no_locks: None) -> None:
    """Save to one folder: the second save begins when the first has written some of its files."""
    path = tmp_path / "x.ckpt"
    first = save_folder_at(path)
    first.begin("one")
    first.create("__0_0.distcp").close()
    _begin_folder(path)
    for attempt in (lambda: first.create("__0_1.distcp"), lambda: first.sees("one"), first.commit):
        with pytest.raises(CheckpointError, match=r"another save to .*x\.ckpt has begun meanwhile"):
            attempt()
    first.discard()
    assert sorted(entry.name for entry in sibling_path(path, INCOMPLETE).iterdir()) == [".save_id", "__0_0.distcp"]
    assert (sibling_path(path, INCOMPLETE) / "__0_0.distcp").read_bytes() == b"half"


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.exhaustive_variants("sharded-False")
def test_of_two_at_the_same_time_one_wins(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, locks: bool
) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    path, start = tmp_path / "x.ckpt", threading.Barrier(2)

    def save(seed: float) -> Exception | None:
        start.wait()
        return _tried(lambda: SAVES[kind](path, seed))

    with ThreadPoolExecutor(2) as threads:
        for number in range(30):
            seeds = [2.0 * number + 1, 2.0 * number + 2]
            ends = list(threads.map(save, seeds))
            whole = seed_of(path)
            if locks:  # without them each may find that the other has taken its place
                assert None in ends, f"both have failed: {ends}"
                assert whole in [seed for seed, end in zip(seeds, ends, strict=True) if end is None]
            for end in ends:
                assert end is None or "another save to " in str(end), end
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


def test_two_exports_into_one_folder(tmp_path: Path) -> None:
    held = PinnedDirectory(tmp_path)
    assert held.try_lock()
    weights = {"w": ExportWeight(12, lambda: torch.ones(3), lambda value: value.clone())}
    with pytest.raises(CheckpointError, match="is running, and this one has written nothing"):
        export_weights(weights, tmp_path, 100, SingleProcess(), {})
    assert list(tmp_path.iterdir()) == []
    held.unlock()
    assert export_weights(weights, tmp_path, 100, SingleProcess(), {}) == ["model.safetensors"]


@pytest.fixture
def store() -> Iterator[None]:
    with stored():
        yield


def test_in_an_object_store(store: None) -> None:
    path, fs = "memory://bucket/x.ckpt", MemoryFileSystem()
    _folder(path, 1.0)  # type: ignore[arg-type]
    first, second = RemoteFolder(fs, "/bucket/x.ckpt"), RemoteFolder(fs, "/bucket/x.ckpt")
    first.begin("one")
    second.begin("other")
    for attempt in (lambda: first.create("__0_0.distcp"), first.commit):
        with pytest.raises(CheckpointError, match="another save"):
            attempt()
    first.discard()
    assert second.sees("other")
    second.discard()
    assert read_folder(path, None)["seed"] == 1.0


@pytest.mark.parametrize("kind", SAVES)
def test_one_that_began_before_the_removal_of_leftovers_keeps_its_files(tmp_path: Path, kind: str) -> None:
    """Let another save begin at each moment between the look for a leftover and the file or folder of this one."""
    for at in range(30):
        home = tmp_path / str(at)
        home.mkdir()
        path, running = home / "x.ckpt", LocalFolder(home / "x.ckpt")

        def begin(running: LocalFolder = running) -> None:
            running.begin("other")
            running.create("__0_0.distcp").close()

        others: list[Exception | None] = []
        point, error = _points(
            home,
            lambda path=path: SAVES[kind](path, 2.0),
            at,
            lambda others=others, begin=begin: others.append(_tried(begin)),
        )
        if point.startswith(("before exchange", "before rename")) or not point:
            break
        if others == [None]:
            assert re.search(r"another save to \S*x\.ckpt is running", str(error)), f"{point}: {error}"
            running.commit()
            assert (path / "__0_0.distcp").exists(), point
        else:
            assert error is None, f"both have failed at {point}: {error}; {others}"
    assert at > 3


@pytest.mark.parametrize("make", [lambda work: work.write_bytes(b""), lambda work: (work / "a").mkdir(parents=True)])
def test_only_the_leftover_that_was_locked_is_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    work = tmp_path / "x.ckpt.incomplete"
    with removing_leftover(work, "x.ckpt"):
        make(work)  # there was none
    assert work.exists()
    with removing_leftover(work, "x.ckpt"):
        os.rename(work, tmp_path / "x.ckpt")
        make(work)
    assert work.exists()
    with removing_leftover(work, "x.ckpt"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("ending", [INCOMPLETE, REPLACED])
def test_the_previous_checkpoint_is_no_leftover_while_it_is_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    path = tmp_path / "x.ckpt"
    _folder(path, 1.0)
    seen = []

    def refused(work: Path) -> None:
        for save in SAVES.values():
            with pytest.raises(CheckpointError, match="another save to .* is running"):
                save(path, 3.0)
        seen.append(work)
        remove(work)

    monkeypatch.setattr(atomic, "_remove_quietly", refused)
    if ending == REPLACED:  # as on a file system without renameat2()
        monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    _folder(path, 2.0)
    assert seen == [sibling_path(path, ending)]
    assert seed_of(path) == 2.0


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.ENOENT, errno.EISDIR, errno.ENOTDIR])
def test_a_change_during_the_removal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Only on file systems without locks."""
    work = tmp_path / "x.ckpt.incomplete"
    work.mkdir()

    def fails(path: Path) -> None:
        raise OSError(number, "changed meanwhile")

    monkeypatch.setattr(atomic, "remove", fails)
    with pytest.raises(CheckpointError, match="another save to x.ckpt is running"), removing_leftover(work, "x.ckpt"):
        pass
