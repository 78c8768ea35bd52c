"""Test copies through pinned blocks, and from mapped files that may be truncated."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding import host_memory as copies
from lightning_zero.sharding import host_memory as module
from lightning_zero.sharding.host_memory import as_mapped, copy_mapped, copy_small_values, copy_to_host, copy_via_blocks
from lightning_zero.sharding.layout import ShardLayout, memory_order

BLOCK_BYTES = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BLOCK_BYTES", BLOCK_BYTES)


def blocks(count: int) -> list[Tensor]:
    return [torch.empty(BLOCK_BYTES, dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 20 * BLOCK_BYTES + 7])
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (3, 2), (40, 4)])
def test_all_bytes_are_copied_whatever_their_number(nbytes: int, count: int, threads: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    copy_via_blocks(blocks(count), source, target, lambda: lambda: None, threads)
    assert torch.equal(target, source)


def test_a_block_is_filled_again_only_once_a_thread_has_taken_what_came() -> None:
    """A thread copies only data that has arrived."""
    source = torch.arange(30, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES)
    target = torch.zeros_like(source)
    started: list[int] = []
    last = threading.Event()

    def arrival() -> Callable[[], None]:
        number = len(started)
        started.append(number)
        if number == 2:  # all blocks are on their way
            last.set()

        def wait() -> None:
            assert last.wait(10)
            assert (target[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] == 0).all()

        return wait

    copy_via_blocks(blocks(3), source, target, arrival, 2)
    assert torch.equal(target, source)
    assert len(started) == 30


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    def arrival() -> Callable[[], None]:
        def wait() -> None:
            raise RuntimeError("the device is lost")

        return wait

    source = torch.zeros(9 * BLOCK_BYTES, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the device is lost"):
        copy_via_blocks(blocks(2), source, torch.zeros_like(source), arrival, 2)


def test_what_is_on_the_host_already_is_copied_all_the_same() -> None:
    value = torch.randn(7, 5).t().requires_grad_()
    copy = copy_to_host(value)
    assert torch.equal(copy, value)
    assert not copy.requires_grad
    assert copy.stride() == value.stride()
    assert copy.data_ptr() != value.data_ptr()


VALUES = {
    "rows": torch.randn(300, 70),
    "columns": torch.randn(70, 300).t(),
    "cut out": torch.randn(64, 64)[5:60:2, 7:30],
    "images": torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
    "scalar": torch.randn(()),
    "empty": torch.empty(0, 4),
    "complex": torch.randn(6, 2, dtype=torch.complex64).conj(),
    "bits": torch.randn(9, 9) > 0,
}


@pytest.fixture(params=[16 << 20, 1 << 12], ids=["one block", "small blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "READ_BYTES", request.param)
    return int(request.param)


def _saved(path: Path, value: object) -> Tensor:
    torch.save(value, path)
    found: Tensor = torch.load(path, mmap=True)
    return found


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_is_equal(tmp_path: Path, name: str, block: int) -> None:
    value = VALUES[name]
    for source in (value, _saved(tmp_path / "x", value)):
        for into in (
            torch.empty(value.shape, dtype=value.dtype),
            torch.empty(value.shape, dtype=torch.complex128 if value.is_complex() else torch.float64),
            torch.empty((*value.shape, 2), dtype=value.dtype)[..., 0],
        ):
            copy_mapped(source, into)
            assert torch.equal(into, value.to(into.dtype))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("in_its_order", [False, True])
def test_a_part_is_that_of_the_whole(tmp_path: Path, name: str, in_its_order: bool, block: int) -> None:
    value = VALUES[name]
    for world_size in (1, 3):
        layout = ShardLayout.from_shape(
            value.shape, value.dtype, world_size, memory_order(value) if in_its_order else None
        )
        for rank in range(world_size):
            part = layout.part(as_mapped(_saved(tmp_path / "x", value)), rank)
            assert torch.equal(part, layout.part(value, rank))


def test_what_was_changed_before_it_is_copied_is_changed(tmp_path: Path) -> None:
    value = _saved(tmp_path / "x", torch.ones(1 << 16))
    value.data.mul_(2)
    value.numpy()[5] = 7
    into = torch.empty(1 << 16)
    copy_mapped(value, into)
    assert into.sum() == 2 * (1 << 16) + 5


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, name: str, block: int) -> None:
    path = tmp_path / "x y%ü"
    value = _saved(path, VALUES[name])
    os.truncate(path, 4096)
    for into in (torch.empty(value.shape), torch.empty(value.shape, dtype=torch.float64)):
        with pytest.raises(
            CheckpointError, match=rf"{path} was cut off, or its disk is gone, while .* \(Bad address\)"
        ):
            copy_mapped(value, into)
    with pytest.raises(CheckpointError, match="was cut off"):
        ShardLayout.from_shape(value.shape, value.dtype, 2).part(as_mapped(value), 1)


def test_what_is_cut_off_half_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 1 << 16)
    path = tmp_path / "x"
    value = _saved(path, torch.ones(1 << 22))
    real = module._read_block

    def cutting(values: Tensor, into: Tensor, begin: int, length: int) -> None:
        if begin == 100 << 16:
            os.truncate(path, 4096)
        real(values, into, begin, length)

    monkeypatch.setattr(module, "_read_block", cutting)
    with pytest.raises(CheckpointError, match="was cut off"):
        copy_mapped(value, torch.empty(1 << 22))


def test_systems_that_do_not_copy_so_are_asked_in_the_plain_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda *args, **options: object())
    value, into = _saved(tmp_path / "x", torch.randn(300, 70)), torch.empty(300, 70)
    copy_mapped(value, into)
    assert torch.equal(into, value)


def test_small_ones_need_the_file_no_longer(tmp_path: Path) -> None:
    pair = torch.randn(2, 5)
    torch.save({"a": pair, "row": pair[1], "large": torch.randn(1 << 15)}, tmp_path / "x")
    found = torch.load(tmp_path / "x", mmap=True)
    found["param"] = torch.nn.Parameter(found["row"])
    copy_small_values(found.values())
    os.truncate(tmp_path / "x", 0)
    assert torch.equal(found["a"], pair)
    found["row"].zero_()
    assert found["a"][1].sum() == found["param"].sum() == 0, "they share memory as before"


def test_what_is_no_plain_memory_stays_what_it_is(tmp_path: Path) -> None:
    sparse, quantized = torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    torch.save({"sparse": sparse, "rows": torch.eye(3).to_sparse_csr(), "quantized": quantized}, tmp_path / "x")
    found = torch.load(tmp_path / "x", mmap=True)
    copy_small_values(found.values())
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found["rows"].to_dense(), torch.eye(3))
    assert torch.equal(found["quantized"].dequantize(), torch.arange(4.0))
