"""Values out of a file are the same on a device."""

from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint.sharded.checkpoint_tensors import READ_BYTES, RangeReader, StoredTensor, memory_of

pytestmark = pytest.mark.gpu(1)

START = 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_come_through_pinned_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = 9
    whole = torch.randn(rows, READ_BYTES // 4 + 3).to(dtype)  # several blocks, the last one not full
    (tmp_path / "x").write_bytes(b"x" * START + bytes(memory_of(whole)))
    placed = StoredTensor(RangeReader(tmp_path / "x"), START, dtype, whole.shape)
    for index in ((slice(0, rows), slice(0, whole.shape[1])), (slice(3, 5), slice(7, 1000))):
        for kept in (dtype, torch.float64):
            into = torch.full(whole[index].shape, 77, dtype=kept, device="cuda")
            placed.copy(index, into)
            assert torch.equal(into.cpu(), whole[index].to(kept))
    into = torch.zeros(whole.shape[::-1], dtype=dtype, device="cuda").t()
    placed.copy((slice(0, rows), slice(0, whole.shape[1])), into)
    assert torch.equal(into.cpu(), whole)
