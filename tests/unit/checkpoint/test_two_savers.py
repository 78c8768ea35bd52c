"""Two trainings that save to the same place: a checkpoint that stands there is always a whole one, of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.checkpoint.places import INCOMPLETE, beside, remove
from lightning_zero.checkpoint.sharded.folder import RemoteFolder, folder_at
from lightning_zero.checkpoint.sharded.saving import save_sharded
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.folders import read_whole
from tests.helpers.elsewhere import stored
from tests.helpers.save_points import observed
from tests.helpers.saves import save_file, seed_of
from tests.helpers.threaded import on_ranks, sharded_state


def _folder(path: Path, seed: float) -> None:
    """By one rank: its points come in one order."""
    [error] = on_ranks(
        1, lambda together: save_sharded(path, sharded_state(0, 1, seed), {"seed": seed}, together) and None
    )
    if error is not None:
        raise error


def _begin_folder(path: Path) -> None:
    folder_at(path).begin("another save")
    (beside(path, INCOMPLETE) / "__0_0.distcp").write_bytes(b"half")


def _begin_file(path: Path) -> None:
    remove(beside(path, INCOMPLETE))
    beside(path, INCOMPLETE).write_bytes(b"half")


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

        def meanwhile(path: Path = path) -> None:
            SAVES[kind](path, 3.0) if whole else BEGINS[kind](path)

        point, error = _points(home, lambda path=path: SAVES[kind](path, 2.0), at, meanwhile)
        if not point:
            break
        if point.startswith(TAKEN_UNSEEN):
            continue
        found = seed_of(path)
        assert found in ((1.0, 2.0, 3.0) if whole else (1.0, 2.0)), point
        assert whole or found == (2.0 if error is None else 1.0), point
        ends.add((found, error is None))
        SAVES[kind](path, 4.0)
        assert seed_of(path) == 4.0, point
    else:
        pytest.fail("never came to an end")
    assert at > 16
    assert (3.0 if whole else 1.0, False) in ends, "nobody was ever told"


def test_the_one_that_was_too_late_leaves_the_other_alone(tmp_path: Path) -> None:
    """Of one folder: the second begins when the first has written everything."""
    path = tmp_path / "x.ckpt"
    first = folder_at(path)
    first.begin("one")
    _begin_folder(path)
    with pytest.raises(CheckpointError, match=r"another save to .*x\.ckpt has begun meanwhile"):
        first.commit()
    first.discard()
    assert (tmp_path / "x.ckpt.incomplete" / "__0_0.distcp").exists()


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
    with pytest.raises(CheckpointError, match="another save"):
        first.commit()
    first.discard()
    assert second.sees("other")
    second.discard()
    assert read_whole(path, None)["seed"] == 1.0
