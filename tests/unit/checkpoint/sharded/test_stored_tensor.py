"""Values that are read out of a file by ranges, against slices of the same tensor."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.sharded import checkpoint_tensors
from lightning_zero.checkpoint.sharded.checkpoint_tensors import RangeReader, StoredTensor, memory_of
from lightning_zero.errors import CheckpointError

START = 24


def _write(path: Path, values: torch.Tensor) -> Path:
    path.write_bytes(b"x" * START + bytes(memory_of(values)) + b"y" * 100)
    return path


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "contiguous": ((9, 7, 5), None),
    "channels last": ((4, 3, 5, 2), (30, 1, 6, 3)),
    "a transpose": ((7, 11), (1, 7)),
    "with gaps": ((5, 4), (12, 2)),
    "expanded": ((6, 3), (0, 1)),
    "one number": ((), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_part_of_any_layout(
    tmp_path: Path, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checkpoint_tensors, "READ_BYTES", 64
    )  # several reads each, and single rows where gaps are large
    memory = torch.arange(400).to(dtype)
    sizes, strides = LAYOUTS[layout]
    lies = memory[: torch.Size(sizes).numel()].view(sizes) if strides is None else memory.as_strided(sizes, strides)
    placed = StoredTensor(RangeReader(_write(tmp_path / "x", memory)), START, dtype, sizes, strides)
    assert (placed.shape, placed.dtype) == (lies.shape, dtype)
    draw = random.Random(1)
    for _ in range(30):
        ends = [sorted(draw.choices(range(size + 1), k=2)) for size in sizes]
        index = tuple(slice(*pair) for pair in ends)
        wanted = lies[index]
        for into in (
            torch.full(wanted.shape, 77, dtype=dtype),
            torch.full(wanted.shape, 77, dtype=torch.float64),
            torch.full((*wanted.shape, 2), 77, dtype=dtype)[..., 0],
        ):
            placed.copy(index, into)
            assert torch.equal(into, wanted.to(into.dtype))


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    class Counted(RangeReader):
        count = 0

        def read(self, begin: int, into: memoryview) -> None:
            Counted.count += len(into)
            super().read(begin, into)

    values = torch.randn(100, 100)
    placed = StoredTensor(Counted(_write(tmp_path / "x", values)), START, values.dtype, values.shape)
    placed.copy((slice(3, 50), slice(0, 100)), torch.empty(47, 100))
    assert Counted.count == 4 * 4700


@pytest.mark.parametrize("left", [START, START + 4 * 50, START + 4 * 999])
def test_a_file_that_ends_too_early_is_named(tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_tensors, "READ_BYTES", 256)
    values = torch.randn(1000)
    placed = StoredTensor(RangeReader(_write(tmp_path / "x", values)), START, values.dtype, values.shape)
    os.truncate(tmp_path / "x", left)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/x was cut off, .*it ends at {left:,} bytes"):
        placed.copy((slice(0, 1000),), torch.empty(1000))


def test_what_a_disk_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10)
    placed = StoredTensor(RangeReader(_write(tmp_path / "x", values)), START, values.dtype, values.shape)

    def broken(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"/x was cut off, or its disk is gone.*Input/output error"):
        placed.copy((slice(0, 10),), torch.empty(10))
