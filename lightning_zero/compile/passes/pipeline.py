"""The default passes and their contracts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lightning_zero.compile.context import GROUPS_PER_GRAPH, MAX_OFFLOAD_BYTES_IN_FLIGHT, PassContext
from lightning_zero.compile.passes.activation_offload import HostCosts, OffloadLimits, place_offloads
from lightning_zero.compile.passes.base import PassSpec
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers, use_unsharded_cache
from lightning_zero.compile.passes.prepare import (
    fuse_casts,
    merge_reduces,
    read_in_place,
    share_gathers,
    sink_gathers,
    split_gathers,
)
from lightning_zero.compile.passes.publish_plan import publish_plan
from lightning_zero.compile.passes.reduce_groups import (
    enqueue_gradients,
    group_reduces,
    reduce_after_reads,
    zero_copy_gradients,
)
from lightning_zero.compile.passes.saved_weights import SavedLimits

PUBLISH_PLAN = PassSpec(
    "publish_plan", publish_plan, requires=frozenset({"started", "enqueued"}), provides=frozenset({"published"})
)
REDUCE_AFTER_READS = PassSpec(
    "reduce_after_reads", reduce_after_reads, requires=frozenset({"enqueued"}), provides=frozenset({"after_reads"})
)
ENQUEUE_GRADIENTS = PassSpec("enqueue_gradients", enqueue_gradients, provides=frozenset({"enqueued"}))

ZERO_COPY_GRADIENTS = PassSpec("zero_copy_gradients", zero_copy_gradients, requires=frozenset({"enqueued"}))

MINIMAL_PASSES = (
    PassSpec("split_gathers", split_gathers, provides=frozenset({"started"}), conflicts=frozenset({"started"})),
    ENQUEUE_GRADIENTS,
    PUBLISH_PLAN,
)


def saved_limits(context: PassContext) -> SavedLimits:
    """Return the limits on weights that a graph keeps for backward."""
    config = context.config
    return SavedLimits(
        context.small_bytes,
        config.unsharded_cache_bytes if config.unsharded_cache_until == "backward" else 0.0,
        context.group_bytes if context.backward_follows and config.prefetch else 0,
        GROUPS_PER_GRAPH,
        context.saved_share,
        context.in_place,
    )


def offload_limits(context: PassContext) -> OffloadLimits | None:
    """Return the limits on activations to offload; None if disabled."""
    config = context.config
    if not config.offload_activations:
        return None
    budget = None if config.offload_activations_mb is None else config.offload_activations_mb * 2**20
    return OffloadLimits(_host_costs(context), context.min_offload_bytes, budget)


def _host_costs(context: PassContext) -> HostCosts:
    hidden = context.config.offload_activations_mb is None  # only copies that compute hides were chosen
    window = float("inf") if hidden else MAX_OFFLOAD_BYTES_IN_FLIGHT
    return HostCosts(context.costs, window)


def default_passes(context: PassContext) -> tuple[PassSpec, ...]:
    """Return the passes for these options; without ``prefetch`` each weight is gathered alone at its use."""
    config = context.config
    in_place, after_reads = _in_place_passes(context)
    if not config.prefetch:
        return *in_place, *MINIMAL_PASSES[:-1], *after_reads, PUBLISH_PLAN
    limits = GroupLimits(context.group_bytes, context.small_bytes, GROUPS_PER_GRAPH, FIRST_GROUPS)
    unstarted = frozenset({"started"})
    group = partial(
        group_gathers,
        world_size=context.world_size,
        limits=limits,
        agreed_plans=context.agreed_plans,
        costs=context.costs,
        window_bytes=context.window_bytes,
    )
    return (
        PassSpec("fuse_casts", fuse_casts, provides=frozenset({"cast"}), conflicts=unstarted),
        PassSpec("sink_gathers", sink_gathers, provides=frozenset({"ordered"}), conflicts=unstarted),
        PassSpec(
            "share_gathers",
            partial(share_gathers, within_bytes=context.group_bytes, small_bytes=context.small_bytes),
            requires=frozenset({"ordered"}),
            conflicts=unstarted,
        ),
        PassSpec(
            "use_unsharded_cache",
            partial(use_unsharded_cache, limits=limits, agreed_plans=context.agreed_plans),
            requires=frozenset({"ordered"}),
            conflicts=unstarted,
        ),
        *in_place,
        PassSpec("group_gathers", group, requires=frozenset({"ordered"}), provides=unstarted, conflicts=unstarted),
        PassSpec("merge_reduces", merge_reduces, conflicts=frozenset({"enqueued"})),
        ENQUEUE_GRADIENTS,
        PassSpec(
            "group_reduces",
            partial(group_reduces, group_bytes=int(config.reduce_group_mb * 2**20), parts=GROUPS_PER_GRAPH),
            requires=frozenset({"enqueued"}),
        ),
        *after_reads,
        *([ZERO_COPY_GRADIENTS] if context.zero_copy_gradients else []),
        *([_place(context)] if config.offload_activations else []),
        PUBLISH_PLAN
        if context.costs.are_nominal
        else replace(PUBLISH_PLAN, apply=partial(publish_plan, costs=context.costs)),
    )


def _in_place_passes(context: PassContext) -> tuple[tuple[PassSpec, ...], tuple[PassSpec, ...]]:
    """Return the passes that read weights in place, and that order gradients after these reads."""
    if context.in_place is None:
        return (), ()
    read = partial(read_in_place, reads=context.in_place)
    conflicts = frozenset({"started", "after_reads"})
    spec = PassSpec("read_in_place", read, provides=frozenset({"in_place"}), conflicts=conflicts)
    return (spec,), (REDUCE_AFTER_READS,)


def _place(context: PassContext) -> PassSpec:
    return PassSpec(
        "place_offloads",
        partial(place_offloads, host=_host_costs(context)),
        requires=frozenset({"started", "enqueued"}),
        conflicts=frozenset({"published"}),
    )


# Nothing hides the first groups of a graph. The first weight comes alone and the next groups grow, so that compute
# begins early. There are two of each size: compute takes little longer than a transfer and must gain a lead before a
# larger one.
FIRST_GROUPS = (0.0, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2)
