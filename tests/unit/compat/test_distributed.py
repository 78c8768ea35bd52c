"""Names in ``compat/distributed.py`` have the expected meaning in this torch."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.compat import cuda
from lightning_zero.compat.distributed import default_store
from lightning_zero.compat.symmetric_memory import symmetric_memory


def test_the_default_store_is_the_one_of_the_process_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert isinstance(default_store(), dist.Store)
        assert default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="not been initialized"):
        default_store()


def test_symmetric_memory_is_made_and_met_over_a_group_by_name() -> None:
    assert {"dtype", "device"} <= set(inspect.signature(symmetric_memory.empty).parameters)
    assert list(inspect.signature(symmetric_memory.rendezvous).parameters)[:2] == ["tensor", "group"]
    assert list(inspect.signature(symmetric_memory.get_backend).parameters) == ["device"]


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_cuda_names_are_functions() -> None:
    for function in (cuda.end_allocate_to_pool, cuda.release_pool, cuda.clear_cublas_workspaces, cuda.sleep):
        assert callable(function)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_names_work() -> None:
    cuda.clear_cublas_workspaces()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    cuda.sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 1  # ms
