"""The ways to shard that are compared, each as who holds what, and what travels where for one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.transfers import (
    across_seconds,
    flat_all_reduce_seconds,
    flat_seconds,
    inside_seconds,
)

__all__ = ["BEFORE", "HYBRID_STEP", "SHARDINGS", "Link", "Sharding"]

Count = Callable[[Cluster], int]


@dataclass(frozen=True)
class Link:
    """Seconds in which one layer's transfer keeps the links inside the host busy, and those across."""

    inside: float = 0.0
    across: float = 0.0

    def __add__(self, other: Link) -> Link:
        return Link(self.inside + other.inside, self.across + other.across)

    @property
    def alone(self) -> float:
        """Seconds from beginning to end with nothing beside it: one stage after the other."""
        return self.inside + self.across

    @property
    def beside(self) -> float:
        """Seconds for each layer where many follow one another, and one layer's stage runs beside another's."""
        return max(self.inside, self.across)


@dataclass(frozen=True)
class Sharding:
    """One way.

    Attributes:
        name: of it.
        means: the same in words.
        states: over how many ranks master weights and the optimizer's state are divided.
        copy: over how many the copy to compute with is.
        gather: of one layer with so many bytes, before its forward and again before its backward.
        exchange: seconds before the first layer of a step, in which hosts exchange all copies of so many bytes.
        refresh: of one layer's copies, by other hosts, once in a step, beside the layers before it.
        reduce: of one layer's gradients, in each micro-batch.
        reduce_last: likewise once in a step, of so many bytes in the dtype in which they are added up.
        waiting: over how many ranks gradients are divided, besides, while micro-batches add up on their hosts.
    """

    name: str
    means: str
    states: Count
    copy: Count
    gather: Callable[[Cluster, float], Link]
    reduce: Callable[[Cluster, float], Link]
    exchange: Callable[[Cluster, float], float] = lambda cluster, nbytes: 0.0
    refresh: Callable[[Cluster, float], Link] = lambda cluster, nbytes: Link()
    reduce_last: Callable[[Cluster, float], Link] = lambda cluster, nbytes: Link()
    waiting: Count | None = None

    def gradients(self, model: Model, cluster: Cluster) -> float:
        """Elements of a rank. With one micro-batch nothing has to wait on its host, and with one host nowhere."""
        own = model.parameters / self.states(cluster)
        waits = model.micro_batches > 1 and cluster.hosts > 1
        return own + (model.parameters / self.waiting(cluster) if self.waiting and waits else 0)


def _one(cluster: Cluster) -> int:
    return 1


def _host(cluster: Cluster) -> int:
    return cluster.gpus


def _all(cluster: Cluster) -> int:
    return cluster.ranks


def _nothing(cluster: Cluster, nbytes: float) -> Link:
    return Link()


def _flat(cluster: Cluster, nbytes: float) -> Link:
    """One ring occupies both kinds of links for as long as it takes."""
    seconds = flat_seconds(cluster, nbytes)
    return Link(seconds) if cluster.hosts == 1 else Link(across=seconds)


def _inside(cluster: Cluster, nbytes: float) -> Link:
    return Link(inside_seconds(cluster, nbytes))


def _across(cluster: Cluster, nbytes: float) -> Link:
    return Link(across=across_seconds(cluster, nbytes / cluster.gpus))


def _exchange(cluster: Cluster, nbytes: float) -> float:
    return _across(cluster, nbytes).across


def _both(cluster: Cluster, nbytes: float) -> Link:
    return _inside(cluster, nbytes) + _across(cluster, nbytes)


def _inside_then_all_reduce(cluster: Cluster, nbytes: float) -> Link:
    return _inside(cluster, nbytes) + _all_reduce_across(cluster, nbytes)


def _all_reduce_across(cluster: Cluster, nbytes: float) -> Link:
    """A reduce-scatter and an all-gather."""
    return _across(cluster, nbytes) + _across(cluster, nbytes)


def _all_reduce(cluster: Cluster, nbytes: float) -> Link:
    return Link(across=flat_all_reduce_seconds(cluster, nbytes))


# In this order where they take as long: the first is what the strategy does by default.
SHARDINGS = (
    Sharding("host", 'shard_compute_copy="host"', _all, _host, _inside, _both, refresh=_across),
    Sharding(
        "host, step",
        'shard_compute_copy="host", reduce_across="step"',
        _all,
        _host,
        _inside,
        _inside,
        refresh=_across,
        reduce_last=_across,
        waiting=_host,
    ),
    Sharding("all", 'shard_compute_copy="all"', _all, _all, _both, _both),
    Sharding("flat", "each collective is one of all ranks", _all, _all, _flat, _flat),
    Sharding("hybrid", 'replicate_over="hosts"', _host, _host, _inside, _inside_then_all_reduce),
    Sharding("ddp", "everything on every rank", _one, _one, _nothing, _all_reduce),
)

# "hybrid" that reduces gradients across hosts once in a step.
HYBRID_STEP = Sharding(
    "hybrid, step",
    'replicate_over="hosts", reduce_across="step"',
    _host,
    _host,
    _inside,
    _inside,
    reduce_last=_all_reduce_across,
    waiting=_host,
)

# As "host" would be if hosts exchanged all copies before the first layer, and not each beside the layers before it. For
# tables only: what that is worth.
BEFORE = Sharding("host, before", "the exchange before forward", _all, _host, _inside, _both, exchange=_exchange)
