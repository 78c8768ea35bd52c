"""When the processes that compile kernels are started."""

from unittest.mock import Mock

import pytest
import torch

from lightning_zero.compile import workers
from lightning_zero.config import CompileConfig


@pytest.mark.parametrize(
    ("config", "device", "times"),
    [
        (CompileConfig(), "cuda", 1),
        (CompileConfig(), "cpu", 0),
        (CompileConfig(enabled=False), "cuda", 0),
        (CompileConfig(backend="aot_eager"), "cuda", 0),
    ],
)
def test_workers_are_started_where_kernels_will_be_compiled(
    monkeypatch: pytest.MonkeyPatch, config: CompileConfig, device: str, times: int
) -> None:
    start = Mock()
    monkeypatch.setattr(workers, "maybe_warm_pool", start)
    workers.start_workers(config, torch.device(device))
    assert start.call_count == times
