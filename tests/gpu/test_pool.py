"""The pool over NCCL: each rank on a device of its own, results back on the CPU, failures as with gloo."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankFailure, Ranks


def add_up() -> tuple[torch.Tensor, int]:
    total = torch.ones(3, device="cuda") * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total, torch.cuda.current_device()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_one_rank(ranks: Ranks) -> None:
    [(total, device)] = ranks.run(1, add_up, backend="nccl")
    assert total.device.type == "cpu"
    assert total.tolist() == [1, 1, 1]
    assert device == 0


@pytest.mark.gpu(2, apart=True)
def test_two_ranks_and_a_failure(ranks: Ranks) -> None:
    for total, _ in ranks.run(2, add_up, backend="nccl"):
        assert total.tolist() == [3, 3, 3]
    before = ranks.pool(2, "nccl").pids
    began = time.monotonic()
    with pytest.raises(RankFailure, match="ValueError: planted"):
        ranks.run(2, fail_on, 1, backend="nccl")
    assert time.monotonic() - began < 20
    assert ranks.run(2, os.getpid, backend="nccl") != before
    assert [device for _, device in ranks.run(2, add_up, backend="nccl")] == [0, 1]
