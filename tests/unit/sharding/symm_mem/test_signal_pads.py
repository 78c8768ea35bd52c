"""Rows by which ranks meet on their devices, and take turns."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.symm_mem.signal_pads import SignalPads

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def rows_of_three() -> SignalPads:
    return SignalPads(MagicMock(intra_host=MagicMock(rank=1, size=3)))


class Memory:
    """Of three ranks; this one's own row is mapped twice, as symmetric memory does it."""

    def __init__(self, theirs: str | None = None) -> None:
        self.given: list[tuple[int, torch.dtype]] = []
        self.errors: list[str | None] = []
        self.mine = torch.empty(0)
        self._theirs = theirs

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        self.given.append((numel, dtype))
        self.mine = torch.full((numel,), 7, dtype=dtype)
        return self.mine, [torch.full((numel,), rank, dtype=dtype) for rank in range(3)]

    def first_rank_error(self, error: str | None) -> str | None:
        self.errors.append(error)
        return error or self._theirs


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that were waited for."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def executor_on(device: torch.device, **failing: Any) -> Any:
    executor = MagicMock(device=device)
    executor.transport.configure_mock(**failing)
    return executor


def test_ranks_meet_on_gpus_by_rows_that_are_zero_before_anybody_comes(waited: list[Any]) -> None:
    memory, executor = Memory(), executor_on(GPU)

    def use(rows: list[Tensor]) -> None:
        assert waited == [GPU], "zeros are on the device before another rank writes"
        assert rows[1] is memory.mine
        assert not rows[1].any()
        assert [int(rows[rank][0]) for rank in (0, 2)] == [0, 2]

    executor.transport.set_barrier.side_effect = use
    rows = rows_of_three()
    rows.set_barrier(executor, memory)  # type: ignore[arg-type]
    rows.set_barrier(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(2 * 3, torch.int32)], "a row for each lane, once"
    executor.transport.set_barrier.assert_called_once()


@pytest.mark.parametrize(("device", "memory"), [(CPU, Memory()), (GPU, None)])
def test_ranks_meet_otherwise_on_cpus_and_without_memory(waited: list[Any], device: Any, memory: Any) -> None:
    executor = executor_on(device)
    rows_of_three().set_barrier(executor, memory)
    executor.transport.set_barrier.assert_not_called()
    assert waited == []


def test_memory_that_comes_later_is_still_used(waited: list[Any]) -> None:
    rows, executor = rows_of_three(), executor_on(GPU)
    rows.set_barrier(executor, None)
    rows.set_barrier(executor, Memory())  # type: ignore[arg-type]
    executor.transport.set_barrier.assert_called_once()


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize(
    ("own", "theirs", "said"), [("no NVRTC", None, "no NVRTC"), (None, "rank 2: old", "rank 2: old")]
)
def test_a_kernel_that_a_rank_cannot_compile_is_told_on_every_rank(own: Any, theirs: Any, said: str) -> None:
    memory: Any = Memory(theirs)
    failing = {"side_effect": RuntimeError(own) if own else None}
    executor = executor_on(GPU, set_barrier=MagicMock(**failing), set_epoch_lock=MagicMock(**failing))
    with pytest.raises(
        UnsupportedError,
        match=rf"barriers between devices cannot be compiled \({said}\).*gather_transport='collective' and reduce",
    ):
        rows_of_three().set_barrier(executor, memory)
    with pytest.raises(UnsupportedError, match=rf"the kernels by which ranks take turns cannot be compiled \({said}\)"):
        rows_of_three().set_epoch_lock(executor, memory)
    assert memory.errors == [own, own]


def test_gpus_take_turns_by_a_number_of_each_rank(waited: list[Any]) -> None:
    memory, executor = Memory(), executor_on(GPU)
    rows_of_three().set_epoch_lock(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(3, torch.int32)]
    ((rows,), _) = executor.transport.set_epoch_lock.call_args
    assert rows[1] is memory.mine
    assert waited == [GPU]


def test_cpus_take_turns_by_one_wide_number_each(waited: list[Any]) -> None:
    memory, executor = Memory(), executor_on(CPU)
    rows_of_three().set_epoch_lock(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(1, torch.int64)]
    ((numbers,), _) = executor.transport.set_epoch_lock.call_args
    assert len(numbers) == 3
    assert waited == []
