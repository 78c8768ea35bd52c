"""Files are moved by file systems that rename in their own ways, none of which may lose one."""

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.remote_files import move_file


class Renames(DirFileSystem):
    """In a folder.

    Attributes:
        broken: whether nothing is renamed to this name.
    """

    broken: str | None = None

    def __init__(self, home: Path) -> None:
        super().__init__(path=str(home), fs=LocalFileSystem())

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if path2 == self.broken and path1 != f"{path2}.replaced":
            raise OSError("the network is down")
        super().mv(path1, path2)


class Silent(Renames):
    """As WebHDFS: nothing is done, and nothing said, where a file stands."""

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not self.exists(path2):
            super().mv(path1, path2)


class Refusing(Renames):
    """As SMB."""

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2)


def _files(home: Path) -> dict[str, str]:
    return {entry.name: entry.read_text() for entry in home.iterdir()}


@pytest.mark.parametrize("kind", [Renames, Silent, Refusing])
def test_a_file_takes_the_place_of_another_however_renames_go(kind: type[Renames], tmp_path: Path) -> None:
    (tmp_path / "x.ckpt.replaced").write_text("of a move that was killed")
    for text in ("first", "second"):
        (tmp_path / "x.ckpt.incomplete").write_text(text)
        move_file(kind(tmp_path), "x.ckpt.incomplete", "x.ckpt")
        assert _files(tmp_path)["x.ckpt"] == text
    left = {"x.ckpt.replaced"} if kind is Renames else set()  # which it does not reach
    assert set(_files(tmp_path)) == {"x.ckpt"} | left


@pytest.mark.parametrize("kind", [Renames, Silent, Refusing])
def test_what_stood_there_stays_where_nothing_can_be_renamed(kind: type[Renames], tmp_path: Path) -> None:
    fs = kind(tmp_path)
    fs.broken = "x.ckpt"
    before = {"x.ckpt": "old", "x.ckpt.incomplete": "new"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OSError, match="the network is down"):
        move_file(fs, "x.ckpt.incomplete", "x.ckpt")
    assert _files(tmp_path) == before


def test_a_rename_that_is_silently_not_done_is_an_error(tmp_path: Path) -> None:
    class Never(Renames):
        def mv(self, path1: str, path2: str, **options: Any) -> None:
            pass

    for there in (False, True):
        (tmp_path / "x.incomplete").write_text("new")
        if there:
            (tmp_path / "x").write_text("old")
        before = _files(tmp_path)
        with pytest.raises(OSError, match="has not renamed x"):
            move_file(Never(tmp_path), "x.incomplete", "x")
        assert _files(tmp_path) == before
