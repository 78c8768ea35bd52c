"""Estimate seconds of a step: compute at the measured shares of data sheets, communication as rings.

Layers count as equal. The next layer's weights are gathered while one computes, and in backward the last layer's
gradients are reduced. The first gather and the last reduction of each pass are exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

from lightning_zero.config import EngineConfig
from lightning_zero.planning.fake_step import StepEstimate
from lightning_zero.planning.persistent_memory import ParamShard
from lightning_zero.profiling.devices import LINKS, MEMORY, Device

# Seconds to launch a collective, and of a message to the next GPU of the host or to another host: the defaults of
# NCCL's model (src/graph/tuning.cc) for rings with the protocol LL128.
LAUNCH_S, INSIDE_HOP_S, ACROSS_HOP_S = 14e-6, 1.9e-6, 4e-6
MASTER_BYTES, STATE_BYTES = 4, 8  # per element: the master weight, and the two moments of AdamW


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step.

    Attributes:
        compute: forward and backward of all micro-batches.
        exposed: time in which the GPU waits for communication.
        optimizer: norm, clipping, update and copy.
    """

    compute: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal GPUs.

    Attributes:
        device: one GPU.
        ranks: number of GPUs.
        ranks_per_host: number of GPUs that fit on one host.
    """

    device: Device
    ranks: int
    ranks_per_host: int

    @property
    def hosts(self) -> int:
        return ceil(self.ranks / self.ranks_per_host)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs on one host."""
        return ceil(self.ranks / self.hosts)

    def inside_s(self, nbytes: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter within a host, of ``nbytes`` in all."""
        others = self.gpus - 1
        if not others:
            return 0.0
        return LAUNCH_S + others * (INSIDE_HOP_S + nbytes / self.gpus / (self.device.inside * LINKS))

    def across_s(self, nbytes: float) -> float:
        """Return the seconds of one between hosts, of which each GPU of a host takes its part of ``nbytes``."""
        if self.hosts == 1:
            return 0.0
        hops = ceil(log2(self.hosts)) * ACROSS_HOP_S
        across = self.device.across * LINKS
        return LAUNCH_S + hops + nbytes / self.gpus * (self.hosts - 1) / self.hosts / across

    def number_s(self, ranks: int) -> float:
        """Return the seconds of an all-reduce of one number over ``ranks``."""
        if ranks == 1:
            return 0.0
        hops = (min(ranks, self.gpus) - 1) * INSIDE_HOP_S
        return LAUNCH_S + 2 * (hops + ceil(log2(max(ranks / self.gpus, 1))) * ACROSS_HOP_S)


def step_seconds(
    step: StepEstimate, shards: Sequence[ParamShard], config: EngineConfig, cluster: Cluster, accumulate: int
) -> StepSeconds:
    """Return the seconds of a training step of ``accumulate`` micro-batches, whose pass is ``step``."""
    replicas = cluster.hosts > 1 and config.tuning.replicate_over is not None
    compute_bytes = (
        max((s.compute_dtype(None).itemsize for s in shards), default=4)
        if config.compute_dtype is None
        else config.compute_dtype.itemsize
    )
    wire_bytes = 4 if config.wire_dtype is None else config.wire_dtype.itemsize
    parameters = max(sum(s.numel for s in shards), 1)
    layers = max(ceil(parameters * 2 / (config.tuning.gather_group_mb * 2**20)), 1)
    trained = sum(s.numel for s in shards if s.trained)
    gathered = sum(s.numel * compute_bytes if s.unpacked is None else s.layout.numel * s.dtype.itemsize for s in shards)
    layer_bytes = gathered / layers
    gather = cluster.inside_s(layer_bytes)
    exchange = 0.0 if replicas else cluster.across_s(layer_bytes)  # between hosts, once in a step
    layer_bytes = trained / layers * wire_bytes
    reduce = cluster.inside_s(layer_bytes), cluster.across_s(layer_bytes) * (2 if replicas else 1)
    kept = config.unsharded_cache_until if config.unsharded_cache_mb == inf else "no"
    seconds = 0.0
    for number in range(accumulate):
        forward_gather = gather if number == 0 or kept != "step" else 0.0
        seconds += _pass_seconds(layers, step.forward_s, forward_gather, exchange if number == 0 else 0.0)
        reduces = config.stage != 1 or number == accumulate - 1
        inside, across = reduce if reduces else (0.0, 0.0)
        seconds += _pass_seconds(layers, step.backward_s, inside + (gather if kept == "no" else 0.0), across)
    compute_s = accumulate * (step.forward_s + step.backward_s)
    states = cluster.gpus if replicas else cluster.gpus * cluster.hosts
    # The norm reads the gradient. The update reads gradient, master weight and state and writes the last two. The copy
    # reads the master weight.
    grad_bytes = wire_bytes if config.stage == 1 else 4
    step_bytes = 2 * grad_bytes + 3 * MASTER_BYTES + 2 * STATE_BYTES + compute_bytes
    optimizer_s = trained / states * step_bytes / (cluster.device.bytes_per_s * MEMORY) + cluster.number_s(states)
    return StepSeconds(compute_s, max(seconds - compute_s, 0.0) if cluster.ranks > 1 else 0.0, optimizer_s)


def _pass_seconds(layers: int, compute_s: float, inside_s: float, across_s: float) -> float:
    """Return the seconds of a pass of ``compute_s`` through all layers, from each layer's transfers."""
    each = compute_s / layers
    return inside_s + across_s + each + (layers - 1) * max(each, inside_s, across_s)
