"""Maxima and minima over ranks that keep a NaN.

``ReduceOp.MAX`` and ``ReduceOp.MIN`` lose it: gloo by the order of ranks and elements, NCCL by its own rule. Each rank
gathers the numbers of all ranks and reduces them with torch's ``amax`` or ``amin``, on the device and without a host
synchronization. The result is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.distributed import all_gather_into

__all__ = ["RunCollective", "all_max", "all_min", "run_synchronously"]

RunCollective = Callable[[Callable[[bool], dist.Work | None]], None]


def run_synchronously(start: Callable[[bool], dist.Work | None]) -> None:
    """Run a collective and wait for it."""
    start(False)


def all_max(values: Tensor, group: dist.ProcessGroup, collective: RunCollective = run_synchronously) -> Tensor:
    """Return the largest of all ranks' values, element by element; NaN if any rank has one. Collective.

    Args:
        values: floating-point numbers of any shape, the same shape on every rank.
        group: of the ranks that take part.
        collective: starts the collective and waits for it, see :meth:`Executor.collective`.
    """
    return _gather_from_ranks(values, group, collective).amax(0)


def all_min(values: Tensor, group: dist.ProcessGroup, collective: RunCollective = run_synchronously) -> Tensor:
    """Return the smallest of all ranks' values, element by element; NaN if any rank has one. Collective."""
    return _gather_from_ranks(values, group, collective).amin(0)


def _gather_from_ranks(values: Tensor, group: dist.ProcessGroup, collective: RunCollective) -> Tensor:
    ranks = values.new_empty(group.size(), *values.shape)
    mine = values.detach().reshape(-1)
    collective(lambda later: all_gather_into()(ranks.view(-1), mine, group=group, async_op=later))
    return ranks
