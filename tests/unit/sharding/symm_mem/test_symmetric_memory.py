"""Test the checks of torch's symmetric memory, and that a barrier that does not wait is detected."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric
from lightning_zero.sharding.symm_mem.symmetric_memory import _other_backend, barrier_waits

GPU = torch.device("cuda")


@pytest.mark.parametrize("backend", ["CUDA", None, "NVSHMEM", "NCCL"])
def test_only_one_backend_of_symmetric_memory_is_known_to_wait(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    monkeypatch.setattr(symmetric, "get_backend", lambda device: backend)
    found = _other_backend(GPU)
    if backend in ("CUDA", None):  # unknown before the first allocation, after which it is checked again
        assert found is None
    else:
        assert f"set to '{backend}'" in str(found)
        assert "unset TORCH_SYMMMEM" in str(found)
        assert "set_backend('CUDA')" in str(found)


def probe(world: int, meet: Callable[[int], Any]) -> list[bool]:
    """Return the result of each rank, emulated by a thread, for a barrier that is called with the rank."""
    memory = [torch.full((world,), 7) for _ in range(world)]
    lined_up = threading.Barrier(world)
    with ThreadPoolExecutor(world) as ranks:
        jobs = [
            ranks.submit(barrier_waits, memory[rank], memory, rank, lambda rank=rank: meet(rank), lined_up.wait)
            for rank in range(world)
        ]
        return [job.result(60) for job in jobs]


@pytest.mark.parametrize("world", [2, 3])
def test_a_barrier_that_waits_passes(world: int) -> None:
    barrier = threading.Barrier(world)
    assert probe(world, lambda rank: [barrier.wait()]) == [True] * world


def test_an_empty_stub_is_found_out() -> None:
    assert not any(probe(2, lambda rank: None))


def test_one_that_leaves_a_rank_out_is_found_out_on_some_rank() -> None:
    two = threading.Barrier(2)
    assert not all(probe(3, lambda rank: rank < 2 and [two.wait()]))
