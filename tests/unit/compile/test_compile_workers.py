"""Test that compile workers start where kernels will be compiled."""

from queue import Queue
from threading import get_ident
from unittest.mock import Mock

import pytest
import torch

from lightning_zero.compile import async_compile
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
    start, summed = Mock(), Queue[int]()
    monkeypatch.setattr(async_compile, "maybe_warm_pool", start)
    monkeypatch.setattr(async_compile, "triton_key", lambda: summed.put(get_ident()))
    async_compile.start_compile_workers(config, torch.device(device))
    assert start.call_count == times
    for _ in range(times):
        assert summed.get(timeout=60) != get_ident(), "in a thread of its own, beside what comes next"
    assert summed.empty()
