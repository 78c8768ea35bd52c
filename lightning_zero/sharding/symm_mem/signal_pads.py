"""Small rows of numbers of each rank, which all ranks of its host write: for barriers on their devices, for turns, and
for what comes from other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.symm_mem.memory import SymmetricMemory

__all__ = ["SignalPads"]

log = logging.getLogger(__name__)

LANES = 2  # of barriers on devices: gradients, weights


class SignalPads:
    """Gives them to one executor.

    Args:
        mesh: of the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._inside = mesh.intra_host
        self._barrier = False

    def set_barrier(self, executor: Executor, memory: SymmetricMemory | None) -> None:
        """Barriers on devices are our own kernel from now on. Harmless when repeated. Collective.

        Raises:
            UnsupportedError: on every rank, when a rank cannot compile it.
        """
        if memory is None or self._barrier or executor.device.type != "cuda":
            return
        self._barrier = True
        if error := self._given(memory, executor, LANES * self._inside.size, executor.transport.set_barrier):
            raise UnsupportedError(
                f"The kernel of barriers between devices cannot be compiled ({error}). Pass "
                "gather_transport='collective' and reduce_transport='collective' to the strategy."
            )

    def set_epoch_lock(self, executor: Executor, memory: SymmetricMemory) -> None:
        """Lets ranks take turns to read and to write shards. Collective.

        Raises:
            UnsupportedError: on every rank, when there is no memory, or when a rank cannot compile the kernels.
        """
        if executor.device.type == "cpu":
            executor.transport.set_epoch_lock(memory.empty(1, torch.int64)[1])
        elif error := self._given(memory, executor, self._inside.size, executor.transport.set_epoch_lock):
            raise UnsupportedError(f"the kernels by which ranks take turns cannot be compiled ({error})")

    def tell_arrivals(self, executor: Executor, memory: SymmetricMemory | None) -> None:
        """What comes from other hosts, part by part, is told to the ranks that read it: those of the host, out of
        ``memory``; without, this rank alone. Collective.

        Raises:
            UnsupportedError: on every rank, when there is no memory, or when a rank cannot compile the kernels.
        """
        take = executor.transport.set_remote_signals
        if executor.device.type == "cpu":
            if memory is not None:
                take(memory.empty(1, torch.int64)[1])
        elif memory is not None:
            if error := self._given(memory, executor, self._inside.size, take):
                raise UnsupportedError(f"the kernels by which ranks wait for other hosts cannot be compiled ({error})")
        else:
            try:
                take([torch.zeros(1, dtype=torch.int32, device=executor.device)])
            except RuntimeError as error:
                log.info("Replays wait for all that other hosts send before they begin: %s.", error)

    def _given(
        self, memory: SymmetricMemory, executor: Executor, numel: int, use: Callable[[list[Tensor]], None]
    ) -> str | None:
        """Gives ``use`` zeros of each rank of the host, int32 that all of these can write; returns a rank's error.
        Ranks meet in one way or in another, and nobody before all rows are zero. Collective."""
        mine, all_ranks = memory.empty(numel, torch.int32)
        mine.zero_()
        torch.cuda.synchronize(executor.device)
        error = None
        try:
            use([mine if rank == self._inside.rank else other for rank, other in enumerate(all_ranks)])
        except RuntimeError as failure:
            error = str(failure)
        return memory.first_rank_error(error)
