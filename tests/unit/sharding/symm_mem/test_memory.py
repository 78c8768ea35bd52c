"""Whether torch's symmetric memory can be relied on."""

import pytest
import torch

from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric
from lightning_zero.sharding.symm_mem.memory import _other_backend

GPU = torch.device("cuda")


@pytest.mark.parametrize("backend", ["CUDA", None, "NVSHMEM", "NCCL"])
def test_only_one_backend_of_symmetric_memory_is_known_to_wait(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    monkeypatch.setattr(symmetric, "get_backend", lambda device: backend)
    found = _other_backend(GPU)
    if backend in ("CUDA", None):  # none is settled before the first allocation, after which it is asked again
        assert found is None
    else:
        assert f"set to '{backend}'" in str(found)
        assert "unset TORCH_SYMMMEM" in str(found)
        assert "set_backend('CUDA')" in str(found)
