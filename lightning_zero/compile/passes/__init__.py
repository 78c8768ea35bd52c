"""Graph passes: pure functions from a graph to a graph, run in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_zero.compile.passes.announce import announce_plan
from lightning_zero.compile.passes.base import PassSpec, run_passes
from lightning_zero.compile.passes.cast import fuse_casts
from lightning_zero.compile.passes.group import group_gathers
from lightning_zero.compile.passes.kept import use_kept
from lightning_zero.compile.passes.merge import merge_reduces, share_gathers
from lightning_zero.compile.passes.reduce import group_reduces, hand_over_gradients, hold_gradients
from lightning_zero.compile.passes.sink import sink_gathers
from lightning_zero.compile.passes.split import split_gathers
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.estimate import NOMINAL, Costs

__all__ = ["MINIMAL_PASSES", "PassSpec", "default_passes", "keeping", "run_passes", "small_weight_bytes"]

ANNOUNCE = PassSpec(
    "announce_plan", announce_plan, requires=frozenset({"started", "handed over"}), provides=frozenset({"announced"})
)
HAND_OVER = PassSpec("hand_over_gradients", hand_over_gradients, provides=frozenset({"handed over"}))

HOLD = PassSpec("hold_gradients", hold_gradients, requires=frozenset({"handed over"}))

MINIMAL_PASSES = (
    PassSpec("split_gathers", split_gathers, provides=frozenset({"started"}), conflicts=frozenset({"started"})),
    HAND_OVER,
    ANNOUNCE,
)


def small_weight_bytes(config: CompileConfig) -> int:
    """Up to this size weights are gathered all together, and kept for backward."""
    return SMALL_BYTES if config.prefetch else 0


def keeping(config: CompileConfig, last: bool, share: float = 0.0) -> tuple[int, float, int, int, float]:
    """What is kept for backward, as arguments of :func:`choose_kept`.

    ``last``: whether backward follows right after the graph's forward. ``share``: of the graph's weights, besides.
    """
    budget = config.resident_bytes if config.resident_until == "backward" else 0.0
    group_bytes = int(config.gather_group_mb * 2**20) if last and config.prefetch else 0
    return small_weight_bytes(config), budget, group_bytes, GROUPS_PER_GRAPH, share


def default_passes(
    config: CompileConfig,
    world_size: int,
    agreed: Sequence[GraphPlan] = (),
    costs: Costs = NOMINAL,
    hold: bool = False,
) -> tuple[PassSpec, ...]:
    """The passes for these options: without ``prefetch`` each weight is gathered by itself, where it is used.

    Args:
        agreed: plans that graphs of the same weights must follow.
        costs: estimates by which gathers are placed.
        hold: the executor can send gradients from where they lie.
    """
    if not config.prefetch:
        return MINIMAL_PASSES
    group_bytes, small_bytes = int(config.gather_group_mb * 2**20), small_weight_bytes(config)
    unstarted = frozenset({"started"})
    group = partial(
        group_gathers,
        world_size=world_size,
        group_bytes=group_bytes,
        small_bytes=small_bytes,
        parts=GROUPS_PER_GRAPH,
        ahead=1,
        agreed=tuple(agreed),
        first=FIRST_GROUPS,
        costs=costs,
        window_bytes=None if config.prefetch_mb is None else config.prefetch_mb * 2**20,
    )
    return (
        PassSpec("fuse_casts", fuse_casts, provides=frozenset({"cast"}), conflicts=unstarted),
        PassSpec("sink_gathers", sink_gathers, provides=frozenset({"ordered"}), conflicts=unstarted),
        PassSpec(
            "share_gathers",
            partial(share_gathers, within_bytes=group_bytes, small_bytes=small_bytes),
            requires=frozenset({"ordered"}),
            conflicts=unstarted,
        ),
        PassSpec(
            "use_kept",
            partial(use_kept, group_bytes=group_bytes, parts=GROUPS_PER_GRAPH, ahead=1, agreed=tuple(agreed)),
            requires=frozenset({"ordered"}),
            conflicts=unstarted,
        ),
        PassSpec("group_gathers", group, requires=frozenset({"ordered"}), provides=unstarted, conflicts=unstarted),
        PassSpec("merge_reduces", merge_reduces, conflicts=frozenset({"handed over"})),
        HAND_OVER,
        PassSpec(
            "group_reduces",
            partial(group_reduces, group_bytes=int(config.reduce_group_mb * 2**20), parts=GROUPS_PER_GRAPH),
            requires=frozenset({"handed over"}),
        ),
        *([HOLD] if hold else []),
        ANNOUNCE,
    )


# Enough groups that a graph of little weight still overlaps transfers with compute.
GROUPS_PER_GRAPH = 12
# Nothing hides the first groups of a graph: the weight that is needed first comes alone, and the next ones in groups
# that grow to full size, so that compute begins early and waits for little at a time. Two of each size: compute with a
# group takes little longer than its transfer, and must win a lead before it can hide a larger one.
FIRST_GROUPS = (0.0, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2)
# Biases and norms: a transfer of their own is not worth its launch, and keeping them costs next to nothing.
SMALL_BYTES = 64 * 1024
