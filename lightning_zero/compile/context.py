"""Inputs of the graph passes other than the graph itself.

Equal graphs with equal contexts give equal results on every rank. Nothing that a pass changes is stored here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_zero.compile.fx_utils import InPlaceReads
from lightning_zero.compile.graph_plan import GraphPlan
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel

# Number of groups in graphs with few weights, so that transfers still overlap with compute.
GROUPS_PER_GRAPH = 12
# Bytes. Transferring biases and norms separately costs more in launches than keeping them costs in memory.
SMALL_BYTES = 64 * 1024
# Bytes. Copies of smaller activations cost more in launches than they save in memory.
MIN_OFFLOAD_BYTES = 1 << 20
# Bound in bytes for offloads and reloads in flight when compute has to wait for copies.
MAX_OFFLOAD_BYTES_IN_FLIGHT = 256 << 20


@dataclass(frozen=True)
class PassContext:
    """Options and measurements that one graph is compiled with.

    Attributes:
        world_size: number of shards of each weight.
        costs: estimates that decide where gathers start; equal on all ranks.
        agreed_plans: plans of graphs that have run. Later graphs of the same weights follow them.
        zero_copy_gradients: the executor sends gradients from the graph's memory, so graphs must not reuse it at once.
        saved_share: share, from 0 to 1, of the bytes gathered twice that the graph keeps for backward in addition to
            what ``config`` requests.
        fp8_shards: weights whose products are all in fp8 are gathered in fp8, see ``sharding/fp8_shards.py``.
        compute_dtype: dtype of compute shards, None without them.
        backward_follows: backward runs right after this graph's forward, with no other graph in between.
    """

    config: CompileConfig
    world_size: int
    costs: CostModel = NOMINAL_COSTS
    agreed_plans: tuple[GraphPlan, ...] = ()
    zero_copy_gradients: bool = False
    saved_share: float = 0.0
    backward_follows: bool = False
    fp8_shards: bool = False
    compute_dtype: torch.dtype | None = None

    @property
    def in_place(self) -> InPlaceReads | None:
        """Return what graphs can read in place because this rank holds whole weights; None if it does not."""
        if self.world_size > 1:
            return None
        fp8 = (torch.float8_e4m3fn,) if self.fp8_shards else ()
        return InPlaceReads(frozenset(dtype for dtype in (self.compute_dtype, *fp8) if dtype is not None))

    @property
    def small_bytes(self) -> int:
        """Return the result of :func:`small_weight_bytes`."""
        return small_weight_bytes(self.config)

    @property
    def min_offload_bytes(self) -> int:
        """Return the size in bytes below which activations stay on the device."""
        return MIN_OFFLOAD_BYTES

    @property
    def group_bytes(self) -> int:
        """Return the bound in bytes of unsharded weights per group."""
        return int(self.config.gather_group_mb * 2**20)

    @property
    def window_bytes(self) -> float | None:
        """Return the bound in bytes of unsharded weights in flight or in use; None means two groups."""
        return None if self.config.prefetch_mb is None else self.config.prefetch_mb * 2**20


def small_weight_bytes(config: CompileConfig) -> int:
    """Return the size in bytes up to which weights are gathered together and kept for backward."""
    return SMALL_BYTES if config.prefetch else 0
