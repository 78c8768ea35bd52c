"""Seconds of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.planning.step_seconds import Cluster, StepSeconds, step_seconds
from lightning_zero.profiling.devices import LINKS, MEMORY, find_device

PARAMETERS, LAYERS = 32 << 20, 2  # layers of 32 MiB in bfloat16


def _estimate(
    ranks: int, ranks_per_host: int = 8, accumulate: int = 1, compute_s: float = 3e-6, **more: Any
) -> StepSeconds:
    tuning = SimpleNamespace(gather_group_mb=32, replicate_over=more.pop("replicate_over", None))
    bf16 = torch.bfloat16
    given = {
        "stage": 3,
        "unsharded_cache_until": "step",
        "unsharded_cache_mb": 0,
        "compute_dtype": bf16,
        "wire_dtype": bf16,
    }
    config = SimpleNamespace(tuning=tuning, **given | more)
    layout = SimpleNamespace(numel=PARAMETERS)
    cuts = [SimpleNamespace(numel=PARAMETERS, layout=layout, trained=True, unpacked=None)]
    step = SimpleNamespace(forward_s=compute_s / 3, backward_s=compute_s * 2 / 3)
    return step_seconds(step, cuts, config, Cluster(find_device("H200"), ranks, ranks_per_host), accumulate)  # type: ignore[arg-type]


def test_one_gpu_waits_for_nothing() -> None:
    device = find_device("H200")
    found = _estimate(1, accumulate=4)
    assert found.compute == pytest.approx(4 * 3e-6)
    assert found.exposed == 0
    assert found.optimizer == pytest.approx(PARAMETERS * 38 / (device.bytes_per_s * MEMORY))


def test_transfers_longer_than_compute_are_exposed() -> None:
    device = find_device("H200")
    each = 14e-6 + 7 * 1.9e-6 + PARAMETERS / LAYERS * 2 * 7 / 8 / (device.inside * LINKS)
    found = _estimate(8)
    # Forward gathers each layer. Backward gathers and reduces each layer. Compute of one layer of each pass is exposed.
    assert found.exposed + found.compute == pytest.approx(3 * LAYERS * each + 3e-6 / LAYERS)
    assert _estimate(8, compute_s=10.0).exposed == pytest.approx(3 * each)


def test_hosts_replicas_stages_and_kept_weights_change_the_bytes() -> None:
    one, two = _estimate(8), _estimate(16)
    assert two.exposed > one.exposed
    assert _estimate(16, accumulate=4).exposed < 4 * two.exposed  # weights cross hosts once in a step
    assert _estimate(16, replicate_over="hosts").optimizer > two.optimizer
    assert _estimate(8, accumulate=4, stage=1).exposed < _estimate(8, accumulate=4).exposed
    kept = {"unsharded_cache_until": "step", "unsharded_cache_mb": float("inf")}
    assert _estimate(8, accumulate=4, **kept).exposed < _estimate(8, accumulate=4).exposed
