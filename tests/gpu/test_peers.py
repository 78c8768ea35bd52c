"""Memory that GPUs of one host read and write: their waits for each other, and its source."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding.symm_mem import SymmetricMemory
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)

GIB = 2**30


def memory() -> tuple[SymmetricMemory | None, str]:
    return SymmetricMemory.of(Mesh.from_world(torch.device("cuda", torch.cuda.current_device())))


def why_not(stub: bool) -> str:
    with patch.object(
        SymmetricMemory, "_device_barrier", (lambda self: None) if stub else SymmetricMemory._device_barrier
    ):
        return memory()[1]


def test_a_barrier_between_gpus_waits_and_a_stub_is_found_out(ranks: Ranks) -> None:
    assert ranks.run(2, why_not, False, backend="cpu:gloo,cuda:nccl") == ["", ""]
    for reason in ranks.run(2, why_not, True, backend="cpu:gloo,cuda:nccl"):
        assert "does not wait" in reason


def where_memory_is_short() -> tuple[int, str]:
    """Rank 1's allocator keeps nearly all of its device, and then another process does."""
    peers, _ = memory()
    assert peers is not None
    free = torch.cuda.mem_get_info()[0]
    if dist.get_rank() == 1:
        cached = torch.empty(free - 2 * GIB, dtype=torch.uint8, device="cuda")
        del cached
    mine, _ = peers.empty(4 * GIB, torch.uint8)
    before = peers.nbytes
    used = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    try:
        with peers.all_or_nothing():
            peers.empty(GIB, torch.uint8)
            peers.empty(4 * GIB, torch.uint8)
    except UnsupportedError as error:
        assert peers.nbytes == before
        del used
        torch.cuda.empty_cache()
        dist.barrier()  # no process maps it any more
        left = torch.cuda.mem_get_info()[0]
        assert left > free - 4 * GIB - GIB // 2, "what was allocated before it failed is still there"
        return mine.numel(), str(error)
    return mine.numel(), "there was memory"


@pytest.mark.gpu(2, apart=True)
def test_what_the_allocator_keeps_is_used_and_what_is_used_is_told(ranks: Ranks) -> None:
    for size, message in ranks.run(2, where_memory_is_short, backend="cpu:gloo,cuda:nccl"):
        assert size == 4 * GIB
        assert "cannot be allocated on rank 0" in message
