"""A warning where another way to shard over several hosts is estimated to be much faster, from what was measured when
the training began, and data sheets where nothing was."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

import torch

from lightning_zero.engine import Engine
from lightning_zero.profiling.devices import LINKS, MEMORY, Device, device_named
from lightning_zero.profiling.estimate import Costs
from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.profiling.scale.advice import BY_OPTIONS, advice
from lightning_zero.profiling.scale.estimate import estimate
from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.sharding import Sharding

__all__ = ["other_sharding"]


def other_sharding(engine: Engine, accumulate: int = 1) -> str:
    """In words, with the arguments to pass; "" where there is one host, where nothing is known to estimate it by, and
    where nothing is much faster. Once graphs have run.

    Args:
        engine: that trains.
        accumulate: micro-batches in one step of the optimizer.
    """
    if engine.mesh.host_count == 1 or engine.device.type != "cuda" or not engine.config.compile:
        return ""
    card = device_named(torch.cuda.get_device_name(engine.device))
    compute_s = _compute_seconds(engine)
    if card is None or not compute_s:
        return ""
    tuning = engine.config.tuning
    once = tuning.reduce_across == "step" and accumulate > 1
    name = "hybrid" if engine.mesh.replicated else tuning.shard_compute_copy
    now = BY_OPTIONS[f"{name}, step" if once and name != "all" else name]
    cluster = _cluster(engine, card)
    return advice(_with_activations(_model(engine, compute_s, accumulate), cluster, now, engine), cluster, now)


def _compute_seconds(engine: Engine) -> float:
    """Of a micro-batch, as it was estimated when its graphs were compiled. Layers that share a graph show as weights
    that no graph names."""
    sizes = {record.name: record.layout.numel for record in engine.sharder.live}
    plans = engine.session.plans.agreed
    seen = {weight for plan in plans for gather in plan.gathers for weight in gather.weights}
    covered = sum(sizes.get(weight, 0) for weight in seen)
    return sum(plan.compute_s for plan in plans) * sum(sizes.values()) / covered if covered else 0.0


def _cluster(engine: Engine, card: Device) -> Cluster:
    mesh = engine.mesh
    costs = None if mesh.replicated else engine.session.costs  # gathers do not cross hosts
    across = _measured_across(costs, mesh.host_count, mesh.inside.size) or card.across * LINKS
    return Cluster(
        mesh.host_count,
        mesh.inside.size,
        card.memory,
        1.0,  # operations are given in seconds
        card.bytes_per_s * MEMORY,
        card.inside * LINKS,
        min(across, (engine.config.tuning.emulate_bandwidth_across_gbs or inf) * 1e9),
    )


def _measured_across(costs: Costs | None, hosts: int, gpus: int) -> float:
    """Bytes per second between hosts for each GPU, of the largest all-gather of all ranks that was measured; 0 where
    none was. At least: that may have been held up inside hosts."""
    if costs is None:
        return 0.0
    nbytes, seconds = costs.gathers[-1]
    return nbytes * (hosts - 1) / hosts / gpus / seconds


def _model(engine: Engine, compute_s: float, accumulate: int) -> Model:
    config = engine.config
    parameters = sum(record.layout.numel for record in engine.sharder.live)
    compute = 4 if config.compute_dtype is None else config.compute_dtype.itemsize
    return Model(
        parameters=parameters,
        layers=max(ceil(parameters * compute / (config.tuning.gather_group_mb * 2**20)), 1),
        tokens=1,
        flops_per_token=compute_s,
        micro_batches=accumulate,
        compute_bytes=compute,
        wire_bytes=4 if config.wire_dtype is None else config.wire_dtype.itemsize,
        kept=config.resident_until if config.resident_mb == inf else "no",  # type: ignore[arg-type]
    )


def _with_activations(model: Model, cluster: Cluster, now: Sharding, engine: Engine) -> Model:
    """What is allocated at the peak, as it runs, and is not known to be anything else."""
    gauge = MemoryGauge(engine.device)
    peak = gauge.read().allocated if gauge.exists else 0
    return replace(model, activation_bytes=max(0.0, peak - estimate(model, cluster, now).memory.total))
