"""Where ranks copy instead of calling collectives."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.sharding.peers import Peers, _other_backend, _wanted

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "device", "cuda", "usable", "expected"),
    [
        ("auto", GPU, "13.0", True, True),
        ("auto", GPU, "12.8", True, False),
        ("auto", GPU, None, True, False),
        ("auto", GPU, "13.0", False, False),
        ("auto", CPU, None, False, True),
        ("copy", CPU, None, False, True),  # what is impossible is refused later, with its reason
        ("collective", GPU, "13.0", True, False),
    ],
)
def test_copies_are_chosen_where_one_call_makes_many(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: torch.device, cuda: str | None, usable: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert _wanted(choice, device, usable, on_cpu=True) is expected


def test_between_cpus_auto_does_what_is_asked_for() -> None:
    assert not _wanted("auto", CPU, usable=True, on_cpu=False)


class Memory:
    all_or_nothing = staticmethod(nullcontext)

    def empty(self, size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        mine = torch.empty(size, dtype=dtype)
        return mine, [mine, mine]


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_what_adds_up_gradients_on_a_gpu_is_torch_where_no_kernel_can_be_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(Peers, "_set_barrier", lambda self, executor: None)
    executor: Any = MagicMock(world_size=2, rank=0, device=device)
    executor.transport.staging_unit = 2048
    executor.transport.compile_means.side_effect = RuntimeError("no NVRTC")
    sharder: Any = MagicMock(executor=executor)
    mesh: Any = MagicMock(world_size=2, rank=0, device=device)
    peers = Peers(None, Memory(), EngineConfig(), mesh)  # type: ignore[arg-type]
    for _ in range(2):
        assert not peers.allocate(sharder)
    executor.transport.set_staging.assert_called_once()
    assert executor.transport.compile_means.call_count == (device is GPU)
    assert ("take longer: no NVRTC" in caplog.text) == (device is GPU)


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
