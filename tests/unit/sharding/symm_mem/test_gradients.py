"""Memory that gradients are copied into."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.sharding.symm_mem.gradients import GradientTransport

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Memory:
    all_or_nothing = staticmethod(nullcontext)

    def empty(self, size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        mine = torch.empty(size, dtype=dtype)
        return mine, [mine, mine]


def way_on(device: torch.device) -> tuple[GradientTransport, Any]:
    way = GradientTransport(EngineConfig(), MagicMock(world_size=2, rank=0, device=device))
    way.use(Memory(), "")  # type: ignore[arg-type]
    executor = MagicMock(world_size=2, rank=0, device=device)
    executor.transport.staging_unit = 2048
    return way, executor


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_what_adds_up_gradients_on_a_gpu_is_torch_where_no_kernel_can_be_compiled(
    caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    way, executor = way_on(device)
    executor.transport.compile_means.side_effect = RuntimeError("no NVRTC")
    for _ in range(2):
        way.stage(executor, 1.0)
    executor.transport.set_staging.assert_called_once()
    assert executor.transport.compile_means.call_count == (device is GPU)
    assert ("take longer: no NVRTC" in caplog.text) == (device is GPU)


@pytest.mark.parametrize(("bucket_mb", "nbytes"), [(1.0, 2**21), (0.0001, 2048), (0.0015, 4096)])
def test_two_buckets_fit_in_whole_units_of_each_rank(bucket_mb: float, nbytes: int) -> None:
    way, executor = way_on(CPU)
    way.stage(executor, bucket_mb)
    (staging, group, timeout_s), _ = executor.transport.set_staging.call_args
    assert [memory.numel() for memory in staging] == [nbytes, nbytes]
    assert (group, timeout_s) == (way.mesh.intra_host.gather_group, way.mesh.timeout_s)
