"""Copies through blocks of pinned memory, of a device whose copies arrive when the test says."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_zero.sharding import host_memory as copies
from lightning_zero.sharding.host_memory import copy_through, copy_to_host

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BLOCK", BLOCK)


def blocks(count: int) -> list[Tensor]:
    return [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, BLOCK + 1, 20 * BLOCK + 7])
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (3, 2), (40, 4)])
def test_all_bytes_are_copied_whatever_their_number(nbytes: int, count: int, threads: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    copy_through(blocks(count), source, target, lambda: lambda: None, threads)
    assert torch.equal(target, source)


def test_a_block_is_filled_again_only_once_a_thread_has_taken_what_came() -> None:
    """And a thread takes nothing that has not arrived."""
    source = torch.arange(30, dtype=torch.uint8).repeat_interleave(BLOCK)
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
            assert (target[number * BLOCK : (number + 1) * BLOCK] == 0).all()

        return wait

    copy_through(blocks(3), source, target, arrival, 2)
    assert torch.equal(target, source)
    assert len(started) == 30


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    def arrival() -> Callable[[], None]:
        def wait() -> None:
            raise RuntimeError("the device is lost")

        return wait

    source = torch.zeros(9 * BLOCK, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the device is lost"):
        copy_through(blocks(2), source, torch.zeros_like(source), arrival, 2)


def test_what_is_on_the_host_already_is_copied_all_the_same() -> None:
    value = torch.randn(7, 5).t().requires_grad_()
    copy = copy_to_host(value)
    assert torch.equal(copy, value)
    assert not copy.requires_grad
    assert copy.stride() == value.stride()
    assert copy.data_ptr() != value.data_ptr()
