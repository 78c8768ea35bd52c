"""The warning about another way to shard, of an engine that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.compile.plan import Gather, GraphPlan
from lightning_zero.profiling.devices import device_named
from lightning_zero.profiling.estimate import NOMINAL
from lightning_zero.report import other_sharding as module
from lightning_zero.report.other_sharding import _compute_seconds, _measured_across, other_sharding
from tests.helpers.options import config

NUMEL = 500_000_000


def engine(hosts: int = 2, device: str = "cuda", compute_s: float = 0.02, **options: Any) -> Any:
    record = SimpleNamespace(name="w", layout=SimpleNamespace(numel=NUMEL))
    other = SimpleNamespace(name="repeated", layout=SimpleNamespace(numel=3 * NUMEL))
    gather = Gather(("w",), "bfloat16", 2 * NUMEL, 0, "", 0, "")
    plans = tuple(GraphPlan(kind, 1, (gather,), (), compute_s / 2) for kind in ("forward", "backward"))
    return SimpleNamespace(
        mesh=SimpleNamespace(
            host_count=hosts, inside=SimpleNamespace(size=8), replicated=options.get("replicate_over") == "hosts"
        ),
        device=torch.device(device),
        config=config(compute_dtype=torch.bfloat16, reduce_dtype="bf16", **options),
        sharder=SimpleNamespace(live=[record, other]),
        session=SimpleNamespace(plans=SimpleNamespace(agreed=plans), costs=None),
    )


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gauge = SimpleNamespace(exists=True, read=lambda: SimpleNamespace(allocated=20 * 2**30))
    monkeypatch.setattr(module, "MemoryGauge", lambda device: gauge)


def test_gathers_across_a_slow_network_are_warned_of() -> None:
    slow = {"shard_compute_copy": "all", "emulate_bandwidth_across_gbs": 2.0}
    assert 'shard_compute_copy="host"' in other_sharding(engine(**slow))


def test_replicas_are_known_for_what_they_are() -> None:
    slow: dict[str, Any] = {"replicate_over": "hosts", "emulate_bandwidth_across_gbs": 2.0}
    assert "without replicate_over" in other_sharding(engine(**slow), accumulate=8)
    assert other_sharding(engine(**slow | {"reduce_across": "step"}), accumulate=8) == ""


def test_nothing_is_said_of_one_host_and_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"shard_compute_copy": "all", "emulate_bandwidth_across_gbs": 2.0}
    assert other_sharding(engine(hosts=1, **slow)) == ""
    assert other_sharding(engine(device="cpu", **slow)) == ""
    assert other_sharding(engine(compute_s=0.0, **slow)) == ""
    assert other_sharding(engine(shard_compute_copy="all", compute_s=5.0)) == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")
    assert other_sharding(engine(**slow)) == ""


def test_layers_that_share_a_graph_compute_as_well() -> None:
    assert _compute_seconds(engine(compute_s=0.02)) == pytest.approx(0.08)


def test_bandwidth_between_hosts_is_that_of_the_largest_gather() -> None:
    nbytes, seconds = NOMINAL.gathers[-1]
    assert _measured_across(NOMINAL, 2, 8) == pytest.approx(nbytes / 2 / 8 / seconds)
    assert _measured_across(None, 2, 8) == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give_them(name: str, expected: str) -> None:
    found = device_named(name)
    assert found is not None
    assert found.name == expected
