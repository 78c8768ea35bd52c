"""Whether another way to shard over several hosts would be much faster than the one that runs."""

from __future__ import annotations

from lightning_zero.profiling.scale.compare import compare
from lightning_zero.profiling.scale.estimate import estimate
from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.sharding import HYBRID_STEP, SHARDINGS, Sharding

__all__ = ["BY_OPTIONS", "WORTH", "advice"]

WORTH = 1.3  # what is nearer than that, the model may have wrong

# By what the strategy is told to choose them; the one without a word is what it does by default.
BY_OPTIONS = {one.name: one for one in (*SHARDINGS, HYBRID_STEP) if one.name not in ("flat", "ddp")}
ARGUMENTS = {
    "host": 'shard_compute_copy="host", reduce_across="micro-batch"',
    "host, step": 'shard_compute_copy="host", reduce_across="step"',
    "all": 'shard_compute_copy="all"',
    "hybrid": 'replicate_over="hosts", reduce_across="micro-batch"',
    "hybrid, step": 'replicate_over="hosts", reduce_across="step"',
}


def advice(model: Model, cluster: Cluster, now: Sharding) -> str:
    """What to pass instead, in words; "" where nothing that fits is worth it."""
    best = compare(model, cluster, [one for one in BY_OPTIONS.values() if _differs(one, model)])[0].estimate
    current = estimate(model, cluster, now)
    if not best.fits or current.seconds < WORTH * best.seconds:
        return ""
    return (
        f"Over {cluster.hosts} hosts of {cluster.gpus} an optimizer step is estimated to take {_ms(current.seconds)} "
        f"as it runs ({ARGUMENTS[now.name]}), of which {_ms(current.exposed_s)} wait for weights and gradients, and "
        f"{_ms(best.seconds)} with tuning=Tuning({ARGUMENTS[best.sharding.name]}){_without(now, best.sharding)}, at "
        f"{cluster.across / 1e9:.3g} GB/s between hosts for each GPU. Try that."
    )


def _without(now: Sharding, other: Sharding) -> str:
    """What must go for the other."""
    replicas = [one.name.startswith("hybrid") for one in (now, other)]
    if replicas == [True, False]:
        return " and without replicate_over"
    return " and without shard_compute_copy" if now.name == "all" and replicas[1] else ""


def _differs(sharding: Sharding, model: Model) -> bool:
    """Whether it does anything of its own: with one micro-batch, what is reduced once per step is reduced as ever."""
    return model.micro_batches > 1 or not sharding.name.endswith(", step")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
