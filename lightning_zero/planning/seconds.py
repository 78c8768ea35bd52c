"""Seconds of a step: compute from operations and bytes at what devices reach of their data sheets, communication by the
model of :mod:`lightning_zero.profiling.scale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from lightning_zero.config import EngineConfig
from lightning_zero.planning.static import Cut
from lightning_zero.planning.training import StepOnPaper
from lightning_zero.profiling.devices import LINKS, MEMORY, Device
from lightning_zero.profiling.scale.estimate import estimate
from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.sharding import SHARDINGS, Link

if TYPE_CHECKING:
    from lightning_zero.planning.plan import Training

__all__ = ["Seconds", "step_seconds"]


@dataclass(frozen=True)
class Seconds:
    """Of one step of the optimizer.

    Attributes:
        compute: forward and backward of all micro-batches, with nothing to wait for.
        exposed: in which the GPU waits for weights and gradients.
        optimizer: norm, clipping, update and copy.
    """

    compute: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer


def step_seconds(
    step: StepOnPaper, cuts: Sequence[Cut], config: EngineConfig, where: tuple[Device, int, Training]
) -> Seconds:
    """Of a training whose pass forward and backward takes that."""
    device, ranks, how = where
    hosts = ceil(ranks / how.ranks_per_host)
    cluster = Cluster(
        hosts,
        ceil(ranks / hosts),
        device.memory,
        1.0,  # operations are given in seconds
        device.bytes_per_s * MEMORY,
        device.inside * LINKS,
        device.across * LINKS,
    )
    seconds = step.forward_s + step.backward_s
    parameters = max(sum(c.layout.numel for c in cuts), 1)
    wire = config.wire_dtype
    model = Model(
        parameters=parameters,
        layers=max(ceil(parameters * 2 / (config.tuning.gather_group_mb * 2**20)), 1),
        tokens=1,
        flops_per_token=seconds,
        micro_batches=how.accumulate,
        compute_bytes=max((c.used_in(config.compute_dtype).itemsize for c in cuts), default=4)
        if config.compute_dtype is None
        else config.compute_dtype.itemsize,
        wire_bytes=wire.itemsize if wire is not None else 4,
        backward_share=min(max(step.backward_s / seconds, 0.01), 0.99) if seconds else 0.5,
        kept=config.resident_until if config.resident_mb == inf else "no",
    )
    replicas = hosts > 1 and config.tuning.replicate_over is not None
    sharding = next(one for one in SHARDINGS if one.name == ("hybrid" if replicas else "host"))
    if config.stage == 1:
        model = replace(model, grad_bytes=model.wire_bytes)
        sharding = replace(sharding, reduce=lambda *_: Link(), reduce_last=sharding.reduce)
    found = estimate(model, cluster, sharding)
    return Seconds(found.compute_s, found.exposed_s if ranks > 1 else 0.0, found.step_s)
