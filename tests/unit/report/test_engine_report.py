"""Test the words of the startup summary, for devices that this machine may not have."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.report.engine_report import FORWARD_BACKWARD, OPTIMIZER, _replays, _transports

CPU_REASON = "the device is cpu"


def engine(device: str, used: str = "", described: dict[str, str] | None = None) -> Any:
    transports = SimpleNamespace(collectives_used=used, describe=lambda: described or {})
    return SimpleNamespace(device=SimpleNamespace(type=device), world_size=2, transports=transports)


@pytest.mark.parametrize(
    ("device", "model", "optimizer", "words"),
    [
        ("cpu", CPU_REASON, "there are none on device 'cpu'", "no CUDA graphs, because the device is a CPU"),
        ("cuda", "", "", "CUDA graphs: forward and backward, optimizer step"),
        (
            "cuda",
            "a hook reads a gradient",
            "",
            "CUDA graphs: optimizer step (not forward and backward: a hook reads a gradient)",
        ),
        ("cuda", "cuda_graphs=False", "cuda_graphs=False", "no CUDA graphs, because cuda_graphs=False"),
    ],
)
def test_one_reason_against_cuda_graphs_is_named(device: str, model: str, optimizer: str, words: str) -> None:
    assert _replays(engine(device), {FORWARD_BACKWARD: model, OPTIMIZER: optimizer}) == words


def test_transports_are_named_on_gpus_with_the_reason_for_the_slower_one() -> None:
    described = {"weights": "copies in memory that all ranks can read", "gradients": "collectives (no NVLink)"}
    assert _transports(engine("cpu", "gradients use collectives", described)) == []
    assert _transports(engine("cuda")) == ["weights and gradients use peer copies"]
    assert _transports(engine("cuda", "gradients use collectives", described)) == [
        "gradients use collectives (no NVLink)"
    ]
    hosts = {"weights": "collectives; between hosts by all-gathers"}
    assert _transports(engine("cuda", "weights use collectives", hosts)) == ["weights use collectives"]
