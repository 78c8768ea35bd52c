"""Estimate seconds of a step: compute at the shares of data sheets that trainings reach, communication as rings.

Layers are taken to be equal. While one computes, the next one's weights are gathered, and in backward the last one's
gradients are reduced. The first gather and the last reduction of each pass are exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import TYPE_CHECKING

from lightning_zero.config import EngineConfig
from lightning_zero.planning.static import ParamShard
from lightning_zero.planning.training import StepEstimate
from lightning_zero.profiling.devices import LINKS, MEMORY, Device

if TYPE_CHECKING:
    from lightning_zero.planning.plan import Training

__all__ = ["StepSeconds", "step_seconds"]

# Seconds in which NCCL begins a collective, and in which a message reaches the next GPU of a host or another host: the
# defaults of NCCL's own model (src/graph/tuning.cc) for rings with the protocol LL128.
LAUNCH_S, INSIDE_HOP_S, ACROSS_HOP_S = 14e-6, 1.9e-6, 4e-6
MASTER_BYTES, STATE_BYTES = 4, 8  # of one element: the master weight, and the two moments of AdamW


@dataclass(frozen=True)
class StepSeconds:
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


@dataclass(frozen=True)
class _Network:
    """Equal hosts of equal GPUs.

    Attributes:
        hosts: number of hosts.
        gpus: number of GPUs on one host.
        inside: bytes per second that a GPU receives from its host's GPUs while it sends as many.
        across: bytes per second that a GPU receives from other hosts.
    """

    hosts: int
    gpus: int
    inside: float
    across: float

    def inside_s(self, nbytes: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter within a host, of ``nbytes`` in all."""
        others = self.gpus - 1
        return LAUNCH_S + others * (INSIDE_HOP_S + nbytes / self.gpus / self.inside) if others else 0.0

    def across_s(self, nbytes: float) -> float:
        """Return the seconds of one between hosts, of which each GPU of a host takes its part of ``nbytes``."""
        if self.hosts == 1:
            return 0.0
        hops = ceil(log2(self.hosts)) * ACROSS_HOP_S
        return LAUNCH_S + hops + nbytes / self.gpus * (self.hosts - 1) / self.hosts / self.across

    def number_s(self, ranks: int) -> float:
        """Return the seconds of an all-reduce of one number over ``ranks``."""
        if ranks == 1:
            return 0.0
        hops = (min(ranks, self.gpus) - 1) * INSIDE_HOP_S
        return LAUNCH_S + 2 * (hops + ceil(log2(max(ranks / self.gpus, 1))) * ACROSS_HOP_S)


def step_seconds(
    step: StepEstimate, cuts: Sequence[ParamShard], config: EngineConfig, where: tuple[Device, int, Training]
) -> StepSeconds:
    """Return the seconds of a training step whose forward and backward are ``step``."""
    device, ranks, training = where
    hosts = ceil(ranks / training.ranks_per_host)
    network = _Network(hosts, ceil(ranks / hosts), device.inside * LINKS, device.across * LINKS)
    replicas = hosts > 1 and config.tuning.replicate_over is not None
    compute_bytes = (
        max((c.compute_dtype_of(None).itemsize for c in cuts), default=4)
        if config.compute_dtype is None
        else config.compute_dtype.itemsize
    )
    wire_bytes = 4 if config.wire_dtype is None else config.wire_dtype.itemsize
    parameters = max(sum(c.layout.numel for c in cuts), 1)
    layers = max(ceil(parameters * 2 / (config.tuning.gather_group_mb * 2**20)), 1)
    layer_bytes = parameters / layers * compute_bytes
    gather = network.inside_s(layer_bytes)
    exchange = 0.0 if replicas else network.across_s(layer_bytes)  # between hosts, once in a step
    layer_bytes = parameters / layers * wire_bytes
    reduce = network.inside_s(layer_bytes), network.across_s(layer_bytes) * (2 if replicas else 1)
    kept = config.unsharded_cache_until if config.unsharded_cache_mb == inf else "no"
    seconds = 0.0
    for number in range(training.accumulate):
        there = gather if number == 0 or kept != "step" else 0.0
        seconds += _pass_seconds(layers, step.forward_s, there, exchange if number == 0 else 0.0)
        reduces = config.stage != 1 or number == training.accumulate - 1
        inside, across = reduce if reduces else (0.0, 0.0)
        seconds += _pass_seconds(layers, step.backward_s, inside + (gather if kept == "no" else 0.0), across)
    compute_s = training.accumulate * (step.forward_s + step.backward_s)
    states = network.gpus if replicas else network.gpus * network.hosts
    # The norm reads the gradient. The update reads gradient, master weight and state and writes the last two. The copy
    # reads the master weight.
    grad_bytes = wire_bytes if config.stage == 1 else 4
    step_bytes = 2 * grad_bytes + 3 * MASTER_BYTES + 2 * STATE_BYTES + compute_bytes
    optimizer_s = parameters / states * step_bytes / (device.bytes_per_s * MEMORY) + network.number_s(states)
    return StepSeconds(compute_s, max(seconds - compute_s, 0.0) if ranks > 1 else 0.0, optimizer_s)


def _pass_seconds(layers: int, compute_s: float, inside_s: float, across_s: float) -> float:
    """Return the seconds of a pass of ``compute_s`` through all layers, from each layer's transfers."""
    each = compute_s / layers
    return inside_s + across_s + each + (layers - 1) * max(each, inside_s, across_s)
