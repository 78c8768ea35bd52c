"""Tensors that a snapshot copies at once, and its values."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.async_save import snapshot
from lightning_zero.checkpoint.async_save.snapshot import (
    ALIGNMENT,
    MemoryRun,
    Snapshot,
    SnapshotChunk,
    dense_copy,
    layout_runs,
)
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.planner import PickledItem, TensorChunk


def _arena() -> Tensor:
    return torch.arange(4096, dtype=torch.float32)


def _runs(*values: Tensor, guarded: Any = None) -> tuple[list[MemoryRun], list[int], int]:
    return layout_runs([dense_copy(value) for value in values], guarded or [True] * len(values))


def test_neighbours_are_one_run_in_whatever_order_they_come() -> None:
    arena = _arena()
    runs, offsets, size = _runs(arena[3000:], arena[:1000].view(10, 100), arena[1000:3000])
    assert [run.memory.numel() for run in runs] == [arena.nbytes]
    assert runs[0].memory.data_ptr() == arena.data_ptr()
    assert offsets == [12000, 0, 4000]
    assert size == arena.nbytes


def test_other_memory_and_what_is_far_away_are_runs_of_their_own() -> None:
    arena, other = _arena(), torch.zeros(3)
    runs, offsets, size = _runs(arena[:10], arena[20:30], arena[2000:2010], other)
    assert sorted(run.memory.numel() for run in runs) == [12, 40, 120]
    assert offsets[1] - offsets[0] == 80
    assert all(run.offset % ALIGNMENT == 0 for run in runs)
    assert size == 3 * 64 + 64  # of which the longest takes two


def test_what_may_change_at_any_time_is_no_part_of_a_run_that_may_not() -> None:
    arena = _arena()
    runs, _, _ = _runs(arena[:16], arena[16:32], arena[32:48], guarded=[True, False, True])
    assert [(run.memory.numel(), run.guarded) for run in runs] == [(64, False), (192, True)]


def _of_torch() -> Iterator[tuple[str, Tensor]]:
    arena = _arena()
    yield "in the midst of memory", arena[7:19].view(3, 4)
    yield "in an order of its own", arena[128:188].view(3, 4, 5).permute(2, 0, 1)
    yield "a column", arena.view(64, 64)[:, 3]
    yield "expanded", arena[5:6].expand(3, 4)
    yield "the same twice", arena[7:19].view(4, 3)
    yield "halves of it", arena[1:9].view(torch.bfloat16)
    yield "conjugated", torch.randn(4, 3, dtype=torch.complex64).conj()
    yield "negated", torch.randn(4, dtype=torch.complex64).conj().imag
    yield "of no dimension", torch.tensor(7, dtype=torch.int64)
    yield "empty", torch.empty(0, 5)
    yield "flags", torch.tensor([True, False, True])
    yield "of double precision, behind three bytes", torch.arange(5, dtype=torch.float64)


def _piece(name: str, value: Tensor, guarded: bool) -> TensorChunk:
    return TensorChunk((name,), value.shape, Box((0,) * value.dim(), tuple(value.shape)), value, guarded)


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_snapshot_holds_what_was_there(guarded: bool, in_threads: bool) -> None:
    values = dict(_of_torch())
    expected = {name: value.clone().resolve_conj().resolve_neg() for name, value in values.items()}
    taken = Snapshot(torch.device("cpu"), in_threads)
    items = [PickledItem(("blob",), b"abc"), *(_piece(name, value, guarded) for name, value in values.items())]
    with patch.object(snapshot, "COPY_BYTES", 100):  # chunks cross the boundaries
        kept = taken.take(items)
    assert kept[0] is items[0]
    if guarded:
        taken.before_writing()
    for value in values.values():
        if value.numel() and not value.is_conj() and not value.is_neg():
            value.copy_(torch.zeros_like(value)) if value.stride()[:1] != (0,) else None
    taken.wait()
    for name, item in zip(values, kept[1:], strict=True):
        assert isinstance(item, SnapshotChunk)
        found = item.chunk(taken._memory).values
        assert found.dtype == expected[name].dtype, name
        assert torch.equal(found, expected[name]), name
    taken.close()


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_storages_that_share_memory_may_have_different_sizes(guarded: bool, in_threads: bool) -> None:
    """A run longer than its first value's storage would have resized that."""
    lent = _arena().numpy()
    values = [torch.from_numpy(lent[:10]), torch.from_numpy(lent), torch.from_numpy(lent[:20])]
    taken = Snapshot(torch.device("cpu"), in_threads)
    kept = taken.take([_piece(f"{n}", value, guarded) for n, value in enumerate(values)])
    taken.wait()
    for item, value in zip(kept, values, strict=True):
        assert isinstance(item, SnapshotChunk)
        assert torch.equal(item.chunk(taken._memory).values, value)
    taken.close()


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_what_lies_where_nothing_can_be_copied_from_is_an_error(guarded: bool, in_threads: bool) -> None:
    """Earlier content of the memory would have been saved."""
    taken = Snapshot(torch.device("cpu"), in_threads)
    with pytest.raises(NotImplementedError, match="meta"):
        taken.take([_piece("x", torch.empty(3, device="meta"), guarded)])
        taken.wait()
    taken.close()


def test_a_model_of_many_pieces_takes_few_copies() -> None:
    arena = _arena()
    taken, copies = Snapshot(torch.device("cpu")), list[tuple[Tensor, Tensor]]()
    real = taken._copies
    with patch.object(taken, "_copies", lambda runs: copies.extend(real(runs)) or []):
        taken.take([_piece(f"{n}", arena[n : n + 1], True) for n in range(len(arena))])
    taken.close()
    assert len(copies) == 1


class _Later(ThreadPoolExecutor):
    """Begin on request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(1)
        self.now = threading.Event()
        super().submit(self.now.wait, 20)


def test_who_writes_waits_for_copies_on_the_host_and_the_save_does_not() -> None:
    arena = _arena()
    taken, pool = Snapshot(torch.device("cpu"), in_threads=True), _Later()
    with patch.object(snapshot, "ThreadPoolExecutor", lambda *args: pool):
        [kept] = taken.take([_piece("x", arena, True)])
    assert isinstance(kept, SnapshotChunk)
    assert not kept.chunk(taken._memory).values.any(), "nothing was copied yet"
    threading.Timer(0.2, pool.now.set).start()
    taken.before_writing()
    arena.zero_()
    assert torch.equal(kept.chunk(taken._memory).values, _arena())
    taken.close()


def test_what_still_comes_to_the_host_is_copied_when_it_is_there() -> None:
    """Offloaded state leaves the device after the step, without a wait for the last of it."""
    arena, comes = torch.zeros(4096), threading.Event()

    def wait() -> None:
        assert comes.wait(20)

    taken = Snapshot(torch.device("cpu"), in_threads=True)
    with patch.object(snapshot, "copy_waiter", lambda device: wait):
        [kept] = taken.take([_piece("x", arena, True)])
    arena.copy_(_arena())
    comes.set()
    taken.before_writing()
    arena.zero_()
    assert isinstance(kept, SnapshotChunk)
    assert torch.equal(kept.chunk(taken._memory).values, _arena())
    taken.close()


def test_a_copy_that_fails_is_an_error_of_this_save_alone() -> None:
    taken = Snapshot(torch.device("cpu"), in_threads=True)
    with patch.object(taken, "_copies", lambda runs: [(torch.zeros(3), torch.zeros(4))]):
        taken.take([_piece("x", _arena(), True)])
    taken.before_writing()
    with pytest.raises(RuntimeError, match="size"):
        taken.wait()
    [kept] = taken.take([_piece("x", _arena(), True)])
    taken.wait()
    assert isinstance(kept, SnapshotChunk)
    assert torch.equal(kept.chunk(taken._memory).values, _arena())
    taken.close()
