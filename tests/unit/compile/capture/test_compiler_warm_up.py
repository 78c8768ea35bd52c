"""The compiler warms up while the executor is built."""

from queue import Queue
from threading import get_ident
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compile.capture import compiler_warm_up as workers
from lightning_zero.compile.capture.compiler_warm_up import warm_up
from lightning_zero.config import CompileConfig

CPU = torch.device("cpu")


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    backends: list[Any] = []

    def compile(function: Any, backend: Any, dynamic: bool) -> Any:
        backends.append(backend)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    return backends


def test_on_cpus_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = asked(monkeypatch)
    with torch.no_grad():
        warm_up(CompileConfig(), CPU)
    assert backends == ["aot_eager"]


def test_where_nothing_is_compiled_or_only_together_nothing_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = asked(monkeypatch)
    warm_up(CompileConfig(enabled=False), CPU)
    with dynamo_config.patch(enable_compiler_collectives=True):
        warm_up(CompileConfig(), CPU)
    assert backends == []


def test_an_error_is_left_to_the_users_own_compilation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    with caplog.at_level("INFO"):
        warm_up(CompileConfig(), CPU)
    assert "RuntimeError: no compiler" in caplog.text


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
    monkeypatch.setattr(workers, "maybe_warm_pool", start)
    monkeypatch.setattr(workers, "triton_key", lambda: summed.put(get_ident()))
    workers.start_compile_workers(config, torch.device(device))
    assert start.call_count == times
    for _ in range(times):
        assert summed.get(timeout=10) != get_ident(), "in a thread of its own, beside what comes next"
    assert summed.empty()
