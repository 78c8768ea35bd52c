"""A save where the file system renames nothing across devices, as union and overlay file systems do, ends in place."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zero.checkpoint import atomic
from tests.helpers.saves import save, save_file, seed_of

KINDS: dict[str, Callable[[Path, float], Any]] = {"sharded": save, "full": save_file}


@contextmanager
def _across_devices() -> Iterator[None]:
    """Let every rename of this process fail as one to another device does."""

    def refused(one: Any, other: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(one), None, str(other))

    with (
        patch.multiple(os, rename=refused, replace=refused),
        patch.object(atomic, "exchange", lambda one, other: False),
    ):
        yield


@pytest.mark.parametrize("before", [None, "sharded", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_is_copied_into_place(tmp_path: Path, kind: str, before: str | None) -> None:
    path = tmp_path / "x.ckpt"
    if before is not None:
        KINDS[before](path, 1.0)
    with _across_devices():
        KINDS[kind](path, 2.0)
    assert seed_of(path) == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("before", KINDS)
def test_a_copy_that_fails_leaves_the_last_checkpoint(tmp_path: Path, before: str) -> None:
    path, copied = tmp_path / "x.ckpt", shutil.copyfileobj
    KINDS[before](path, 1.0)

    def full(given: Any, copy: Any, *args: Any) -> None:
        if ".incomplete" in given.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        copied(given, copy, *args)

    hindered = patch.object(shutil, "copyfileobj", full)
    with _across_devices(), hindered, pytest.raises(OSError, match="No space left"):
        save_file(path, 2.0)
    assert seed_of(path) == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]


def test_two_names_on_two_devices_do_not_exchange_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def renameat2(self, *args: Any) -> int:  # noqa: N802 - its name in C
            return -1

    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *args, **kwargs: Refuses())
    monkeypatch.setattr(atomic.ctypes, "get_errno", lambda: errno.EXDEV)
    assert not atomic.exchange(tmp_path / "one", tmp_path / "other")
