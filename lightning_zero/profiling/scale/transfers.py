"""Seconds that collectives take on a cluster: bytes over bandwidth, and hops.

A ring moves (n-1)/n of the whole over each of its n members and takes n-1 hops (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms", 2009); a tree takes log2(n) hops. How hops add up inside hosts and across is as in NCCL's own
model (src/graph/tuning.cc), and so are the latencies that :class:`Cluster` has by default: those of rings with the
protocol LL128, which favours rings of many ranks. With one rank for each host NCCL gathers and reduces over trees where
a ring would be slower ("PAT", arXiv:2506.20252), and all-reduces between hosts over trees.
"""

from __future__ import annotations

from math import ceil, log2

from lightning_zero.profiling.scale.given import Cluster

__all__ = ["across_seconds", "flat_all_reduce_seconds", "flat_seconds", "inside_seconds"]


def inside_seconds(cluster: Cluster, nbytes: float) -> float:
    """For an all-gather or a reduce-scatter between the GPUs of each host; ``nbytes`` are those of the whole."""
    if cluster.gpus == 1 or not nbytes:
        return 0.0
    others = cluster.gpus - 1
    return cluster.launch_s + others * cluster.inside_hop_s + nbytes * others / cluster.gpus / cluster.inside


def across_seconds(cluster: Cluster, nbytes: float) -> float:
    """For an all-gather or a reduce-scatter between GPUs at the same place of all hosts, all places at once; ``nbytes``
    are those of the whole of one place."""
    if cluster.hosts == 1 or not nbytes:
        return 0.0
    others = cluster.hosts - 1
    hops = min(others, ceil(log2(cluster.hosts)))
    return cluster.launch_s + hops * cluster.across_hop_s + nbytes * others / cluster.hosts / cluster.across


def flat_seconds(cluster: Cluster, nbytes: float) -> float:
    """For an all-gather or a reduce-scatter of all ranks as one ring, or as many rings side by side as a host has
    network cards: each host receives the others' part once, over all of its cards."""
    if cluster.ranks == 1 or not nbytes:
        return 0.0
    inside = nbytes * (cluster.ranks - 1) / cluster.ranks / cluster.inside if cluster.gpus > 1 else 0.0
    across = nbytes * (cluster.hosts - 1) / cluster.hosts / (cluster.gpus * cluster.across)
    between = cluster.hosts - 1
    hops = between * cluster.across_hop_s + (cluster.ranks - 1 - between) * cluster.inside_hop_s
    return cluster.launch_s + hops + max(inside, across)


def flat_all_reduce_seconds(cluster: Cluster, nbytes: float) -> float:
    """For an all-reduce of all ranks: rings inside hosts, trees between them, and everything goes there and back."""
    if cluster.ranks == 1 or not nbytes:
        return 0.0
    inside = 2 * nbytes * (cluster.ranks - 1) / cluster.ranks / cluster.inside if cluster.gpus > 1 else 0.0
    across = 2 * nbytes * (cluster.hosts - 1) / cluster.hosts / (cluster.gpus * cluster.across)
    hops = (cluster.gpus - 1) * cluster.inside_hop_s + ceil(log2(cluster.hosts)) * cluster.across_hop_s
    return cluster.launch_s + 2 * hops + max(inside, across)
