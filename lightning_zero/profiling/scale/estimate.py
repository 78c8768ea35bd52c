"""Seconds and bytes of one step, for one way to shard.

Layers are equal. While one computes, the next one's weights are gathered, and in backward the last one's gradients are
reduced: each layer takes what is longest of its compute, its transfers inside the host, and those across. What nothing
runs beside is exposed: the first gather of forward and of backward, and the last reduction. Transfers take nothing from
compute, and compute nothing from them, but what the cluster's numbers have lost.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import ceil, log2

from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.sharding import Link, Sharding

__all__ = ["Bytes", "Estimate", "estimate"]

AHEAD = 2  # layers whose weights are whole at once: the one that computes, and the next one
BUCKETS = 2  # layers whose gradients are on their way


@dataclass(frozen=True)
class Bytes:
    """Of one rank, at the peak, by what they are for."""

    masters: float
    optimizer: float
    gradients: float
    compute_copy: float
    gathered: float
    buckets: float
    activations: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Estimate:
    """Of one step of the optimizer.

    Attributes:
        sharding: how it was sharded.
        compute_s: seconds of forward and backward in all micro-batches, with nothing to wait for.
        exposed_s: seconds in which the GPU waits for transfers.
        step_s: seconds of norm, clipping and update.
        memory: bytes of one rank.
        fits: whether the GPU has them.
    """

    sharding: Sharding
    compute_s: float
    exposed_s: float
    step_s: float
    memory: Bytes
    fits: bool

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s + self.step_s


def estimate(model: Model, cluster: Cluster, sharding: Sharding) -> Estimate:
    """Of one step of ``model``, on ``cluster``."""
    compute_s = model.micro_batches * model.flops / cluster.flops
    passes = sum(_micro_batch(model, cluster, sharding, number) for number in range(model.micro_batches))
    memory = _bytes(model, cluster, sharding)
    return Estimate(
        sharding,
        compute_s,
        max(passes - compute_s, 0.0),
        _step(model, cluster, sharding),
        memory,
        memory.total <= cluster.memory,
    )


def _micro_batch(model: Model, cluster: Cluster, sharding: Sharding, number: int) -> float:
    """Seconds of forward and backward of one of them."""
    first, last = number == 0, number == model.micro_batches - 1
    per_layer = model.parameters / model.layers
    gather = sharding.gather(cluster, per_layer * model.compute_bytes)
    refresh = sharding.refresh(cluster, per_layer * model.compute_bytes) if first else Link()
    reduce = sharding.reduce(cluster, per_layer * model.wire_bytes)
    if last:
        reduce += sharding.reduce_last(cluster, per_layer * model.grad_bytes)
    there = gather if first or model.kept != "step" else Link()
    back = gather if model.kept == "no" else Link()
    compute = model.flops / cluster.flops / model.layers
    before = sharding.exchange(cluster, model.parameters * model.compute_bytes) if first else 0.0
    forward = before + _pass(model.layers, compute * (1 - model.backward_share), there + refresh, Link())
    return forward + _pass(model.layers, compute * model.backward_share, back, reduce)


def _pass(layers: int, compute: float, gather: Link, reduce: Link) -> float:
    """Seconds of one way through all layers, of which each computes for so long."""
    return gather.alone + compute + (layers - 1) * max(compute, (gather + reduce).beside) + reduce.alone


def _step(model: Model, cluster: Cluster, sharding: Sharding) -> float:
    """Its bytes, and the norm: an all-reduce of one number, which each rank waits for."""
    elements = model.parameters / sharding.states(cluster)
    ranks = sharding.states(cluster)
    if ranks == 1:
        norm = 0.0
    else:
        hops = (min(ranks, cluster.gpus) - 1) * cluster.inside_hop_s
        hops += ceil(log2(ranks / cluster.gpus)) * cluster.across_hop_s if ranks > cluster.gpus else 0.0
        norm = cluster.launch_s + 2 * hops
    return elements * model.step_bytes / cluster.memory_bandwidth + norm


def _bytes(model: Model, cluster: Cluster, sharding: Sharding) -> Bytes:
    own = model.parameters / sharding.states(cluster)
    layer = model.parameters / model.layers
    copy = model.parameters * model.compute_bytes / sharding.copy(cluster)
    whole = sharding.copy(cluster) == 1  # then nothing is gathered: the copy is what is computed with
    gathered = model.layers if model.kept != "no" else min(AHEAD, model.layers)
    return Bytes(
        masters=own * model.master_bytes,
        optimizer=own * model.state_bytes,
        gradients=sharding.gradients(model, cluster) * model.grad_bytes,
        compute_copy=copy,
        gathered=0.0 if whole else gathered * layer * model.compute_bytes,
        buckets=0.0 if cluster.ranks == 1 else min(BUCKETS, model.layers) * layer * model.wire_bytes,
        activations=model.activation_bytes,
    )
