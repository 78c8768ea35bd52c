"""Does a barrier between devices wait? Some backends of torch's symmetric memory have had one that does not, and what
ranks then copy is not there yet: wrong weights, without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.compat import cuda

__all__ = ["barrier_waits"]

LATE_S = 0.01
LATE_CYCLES = 20_000_000  # about as long


def barrier_waits(
    mine: Tensor, everyone: Sequence[Tensor], rank: int, meet: Callable[[], None], line_up: Callable[[], None]
) -> bool:
    """Whether this rank finds, behind a barrier, what a rank that comes late has written into its memory before.
    Collective.

    Args:
        mine: memory of this rank that all can write, 1-D, int64, an element for each rank.
        everyone: that of all ranks, in their order.
        meet: the barrier, on the current stream of the device.
        line_up: another, on the host, which is known to wait.
    """
    mine.zero_()
    found = not mine.any()  # waits for the device
    for late in range(len(everyone)):
        line_up()
        if rank == late:
            _delay(mine.device)
            for memory in everyone:
                memory[late] = late + 1
        meet()
        found = int(mine[late]) == late + 1 and found
    return bool(found)


def _delay(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.sleep(LATE_CYCLES)
    else:
        time.sleep(LATE_S)
