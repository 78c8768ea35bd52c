"""What is said of other ways to shard over several hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zero.profiling.scale.advice import BY_OPTIONS, WORTH, advice
from lightning_zero.profiling.scale.estimate import estimate
from lightning_zero.profiling.scale.given import Cluster, Model

FREE = {"launch_s": 0.0, "inside_hop_s": 0.0, "across_hop_s": 0.0}
# 2 hosts of 4; compute takes a hundredth of what gathers across hosts take.
CLUSTER = Cluster(2, 4, 1e12, flops=1.0, memory_bandwidth=1e15, inside=1e12, across=1e9, **FREE)
MODEL = Model(10**9, 20, tokens=1, flops_per_token=0.01)


def slower(model: Model, cluster: Cluster, now: str, than: str) -> float:
    seconds = {name: estimate(model, cluster, BY_OPTIONS[name]).seconds for name in (now, than)}
    return seconds[now] / seconds[than]


def test_gathers_across_a_slow_network_are_worth_a_word() -> None:
    ratio = slower(MODEL, CLUSTER, "all", "host")
    assert ratio > WORTH
    said = advice(MODEL, CLUSTER, BY_OPTIONS["all"])
    assert 'tuning=Tuning(shard_compute_copy="host", reduce_across="micro-batch")' in said
    assert "2 hosts of 4" in said
    assert "at 1 GB/s" in said


def test_reductions_of_many_micro_batches_are_worth_a_word() -> None:
    model = replace(MODEL, micro_batches=16)
    assert slower(model, CLUSTER, "host", "host, step") > WORTH
    assert 'reduce_across="step"' in advice(model, CLUSTER, BY_OPTIONS["host"])
    assert advice(model, CLUSTER, BY_OPTIONS["host, step"]) == ""


def test_replicas_send_gradients_twice_and_weights_not_at_all() -> None:
    model = replace(MODEL, micro_batches=16)
    assert slower(model, CLUSTER, "hybrid", "hybrid, step") > WORTH
    said = advice(model, CLUSTER, BY_OPTIONS["hybrid"])
    assert 'reduce_across="step") and without replicate_over' in said
    assert "without" not in advice(model, CLUSTER, BY_OPTIONS["host"])
    assert advice(model, CLUSTER, BY_OPTIONS["hybrid, step"]) == ""
    waiting = [estimate(model, CLUSTER, BY_OPTIONS[name]).memory.gradients for name in ("hybrid", "hybrid, step")]
    assert waiting[1] == 2 * waiting[0]


@pytest.mark.parametrize("now", ["host", "all"])
@pytest.mark.parametrize("across", [1e12, 1e11])
def test_nothing_is_said_of_what_is_nearly_as_fast(now: str, across: float) -> None:
    model, cluster = replace(MODEL, flops_per_token=1.0), replace(CLUSTER, across=across)
    assert max(slower(model, cluster, "all", "host"), slower(model, cluster, "host", "all")) < WORTH
    assert advice(model, cluster, BY_OPTIONS[now]) == ""


def test_nothing_is_said_of_what_the_gpu_has_no_memory_for() -> None:
    copies = [estimate(MODEL, CLUSTER, BY_OPTIONS[name]).memory.total for name in ("all", "host")]
    assert copies[0] < copies[1]
    assert advice(MODEL, replace(CLUSTER, memory=sum(copies) / 2), BY_OPTIONS["all"]) == ""
    assert advice(MODEL, replace(CLUSTER, memory=copies[1]), BY_OPTIONS["all"]) != ""


def test_with_one_micro_batch_nothing_is_reduced_once_per_step() -> None:
    assert "step" not in advice(MODEL, CLUSTER, BY_OPTIONS["all"]).replace("an optimizer step", "")
