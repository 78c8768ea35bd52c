"""A writer's file has the given bytes in order, on the disk; and its errors are raised here."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_zero.checkpoint import file_writers
from lightning_zero.checkpoint.file_writers import (
    COPY_BYTES,
    WRITE_BYTES,
    ThreadedWriter,
    WritebackQueue,
    stable_memory,
)
from lightning_zero.checkpoint.full_checkpoint import write_local_file


def test_all_kinds_of_memory_come_in_their_order(tmp_path: Path) -> None:
    kept = torch.arange(WRITE_BYTES // 4 + 99, dtype=torch.int32)
    passing = bytearray(b"p" * (COPY_BYTES + 1))
    told: list[int] = []
    with (
        open(tmp_path / "x", "xb", buffering=0) as file,
        ThreadedWriter(file, stable_memory([kept]), told.append) as behind,
    ):
        for _ in range(3):
            behind.write(b"small")
            behind.write(kept.numpy())
            behind.write(passing)
            passing[:] = b"q" * len(passing)  # memory that may change
            passing[:] = b"p" * len(passing)
        assert behind.tell() == 3 * (5 + kept.nbytes + len(passing))
    assert (tmp_path / "x").read_bytes() == 3 * (b"small" + kept.numpy().tobytes() + bytes(passing))
    assert sum(told) == (tmp_path / "x").stat().st_size
    assert max(told) == WRITE_BYTES


def test_files_are_what_torch_writes(tmp_path: Path) -> None:
    shared = torch.rand(300, 300)
    value = {
        "shared": [shared, shared.t(), shared[3:5]],
        "large": (torch.rand(WRITE_BYTES // 4 + 1),),
        "strange": torch.eye(40).to_sparse(),
        "passing": torch.nn.Linear(300, 70),  # in an object, in which stable memory is not searched
        "numbers": [b"x" * 100000, 1.5],
    }
    torch.save(value, tmp_path / "archive")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    with open(tmp_path / "theirs" / "x", "wb") as file:
        torch.save(value, file)
    write_local_file(value, tmp_path / "ours" / "x")
    assert (tmp_path / "ours" / "x").read_bytes() == (tmp_path / "theirs" / "x").read_bytes()


class Full:
    """A file on a disk with room for so many calls."""

    name = "/full/x"

    def __init__(self, file: Any, calls: int) -> None:
        self._file, self.calls = file, calls
        self.fileno, self.close = file.fileno, file.close

    def write(self, data: Any) -> int:
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data))


@pytest.mark.parametrize("calls", [0, 3, 8])
def test_a_full_disk_is_named(tmp_path: Path, calls: int) -> None:
    value = {f"{number}": torch.rand(COPY_BYTES) for number in range(6)}

    def save() -> None:
        file: Any = Full(open(tmp_path / "x", "xb", buffering=0), calls)  # noqa: SIM115
        with ThreadedWriter(file, stable_memory(value)) as behind:
            torch.save(value, behind)  # type: ignore[arg-type]

    with pytest.raises(OSError, match="No space left on device: '/full/x'"):
        save()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("the bucket's quota is used up"), "the bucket's quota is used up: '/full/x'"),
        (PermissionError(), "PermissionError: '/full/x'"),
        (OSError(errno.EIO, None), f"[Errno {errno.EIO}] Input/output error: '/full/x'"),
        (OSError(errno.EIO, "bad sector"), f"[Errno {errno.EIO}] bad sector: '/full/x'"),
    ],
)
def test_a_stores_own_words_are_kept(error: OSError, said: str) -> None:
    file: Any = SimpleNamespace(name="/full/x", write=Mock(side_effect=error))
    with pytest.raises(OSError, match=f"^{re.escape(said)}$"):
        file_writers.write_all(file, memoryview(b"x"))


# -- on its way to the disk


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return the requests to the system: begin, bytes, flags."""
    found: list[tuple[int, int, int]] = []

    def ask(number: int, begin: Any, count: Any, flags: Any) -> int:
        found.append((begin.value, count.value, flags.value))
        return 0

    monkeypatch.setattr(file_writers, "_sync_file_range", lambda: ask)
    return found


def test_pieces_are_sent_as_they_come_and_awaited_one_by_one(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writers, "WINDOW", 25)
    came: list[int] = []
    with open(tmp_path / "x", "wb") as file:
        on_its_way = WritebackQueue(file.fileno())
        for _ in range(4):
            on_its_way.add(10)
        sent = [(begin, 10, file_writers.WRITE) for begin in (0, 10, 20, 30)]
        wait = file_writers.BEFORE | file_writers.WRITE | file_writers.AFTER
        assert asked == [*sent[:3], (0, 10, wait), sent[3], (10, 10, wait)]
        asked.clear()
        on_its_way.drain(lambda: came.append(len(asked)))
    assert asked == [(20, 10, wait), (30, 10, wait)]
    assert came == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_a_system_may_refuse_that_but_not_lose_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[int] = []
    synced: list[int] = []

    def refuse(*told: Any) -> int:
        calls.append(1)
        file_writers.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(file_writers, "_sync_file_range", lambda: refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    with open(tmp_path / "x", "wb") as file:
        on_its_way = WritebackQueue(file.fileno())
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                on_its_way.add(10)
            return
        on_its_way.add(10)
        on_its_way.add(10)
        on_its_way.drain(lambda: None)
        assert synced == [file.fileno()]
    assert len(calls) == 1
