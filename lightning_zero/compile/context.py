"""What decides how a graph is rewritten, besides the graph itself: one value that everything which builds passes reads.

Whatever may differ between two graphs of one engine is in here, and nothing that a pass could change: from the same
graph and an equal context every rank gets the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.compile.graph_plan import GraphPlan
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.estimate import NOMINAL_COSTS, CostModel

__all__ = ["MAX_OFFLOAD_BYTES_IN_FLIGHT", "GROUPS_PER_GRAPH", "PassContext", "small_weight_bytes"]

# Enough groups that a graph of little weight still overlaps transfers with compute.
GROUPS_PER_GRAPH = 12
# Biases and norms: a transfer of their own is not worth its launch, and keeping them costs next to nothing.
SMALL_BYTES = 64 * 1024
# Smaller activations stay where they are: their copies would cost more launches than they spare memory.
MIN_OFFLOAD_BYTES = 1 << 20
# Activations on their way to the host, or back, where compute has to wait for copies.
MAX_OFFLOAD_BYTES_IN_FLIGHT = 256 << 20


@dataclass(frozen=True)
class PassContext:
    """What one graph is compiled with.

    Attributes:
        config: the user's options.
        world_size: number of shards that make a weight.
        costs: estimates by which gathers are placed; the same on every rank.
        agreed: plans of graphs that have run, which graphs of the same weights must follow.
        zero_copy_gradients: the executor sends gradients from where they lie, so graphs must leave them there for a while.
        saved_share: of the bytes of weights that the graph gathers twice, from 0 to 1: how much it keeps for backward
            besides what ``config`` says.
        backward_follows: backward comes right after this graph's forward, with no other graph in between.
    """

    config: CompileConfig
    world_size: int
    costs: CostModel = NOMINAL_COSTS
    agreed_plans: tuple[GraphPlan, ...] = ()
    zero_copy_gradients: bool = False
    saved_share: float = 0.0
    backward_follows: bool = False

    @property
    def small_bytes(self) -> int:
        """See :func:`small_weight_bytes`."""
        return small_weight_bytes(self.config)

    @property
    def min_offload_bytes(self) -> int:
        """Smaller ones do not leave."""
        return MIN_OFFLOAD_BYTES

    @property
    def group_bytes(self) -> int:
        """At most so many bytes of whole weights in a group."""
        return int(self.config.gather_group_mb * 2**20)

    @property
    def window_bytes(self) -> float | None:
        """At most so many bytes of whole weights in flight or in use at once; None for two groups."""
        return None if self.config.prefetch_mb is None else self.config.prefetch_mb * 2**20


def small_weight_bytes(config: CompileConfig) -> int:
    """Weights of at most so many bytes are gathered all together, and kept for backward."""
    return SMALL_BYTES if config.prefetch else 0
