"""Weights that peers copy: where shards lie, and their copies in the dtype that is computed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.symm_mem.memory import SymmetricMemory
from lightning_zero.sharding.symm_mem.transport_choice import TransportChoice, wanted

__all__ = ["WeightTransport"]


class WeightTransport(TransportChoice):
    """Of weights."""

    what, option = "weights", "gather_transport"

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._away = "parameters" in config.offload
        # A plan, made once optimizers are known, may put master weights elsewhere.
        self.shards_wait = config.memory is not None
        self._shards: list[Tensor] = []  # this rank's memory that shards lie in

    def copies(self, config: EngineConfig) -> bool:
        if "parameters" in config.offload:
            return False
        return wanted(config.tuning.gather_transport, self.mesh.device, usable=config.compile, on_cpu=True)

    def use(self, memory: SymmetricMemory | None, reason: str) -> None:
        super().use(memory, "master weights lie on the host, by offload" if self._away else reason)

    def allocate_shards(
        self,
        executor: Executor,
        sizes: dict[torch.dtype, int],
        take_turns: Callable[[Executor, SymmetricMemory], None],
    ) -> dict[torch.dtype, tuple[Tensor, list[Tensor]]]:
        """Memory for the shards themselves, 1-D zeros of so many elements, by dtype: this rank's, and that of all
        ranks. Empty where shards are to lie in memory of their own. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough and weights must be copied.
        """
        memory, found = self.memory, {}
        if memory is None or self.mesh.inter_host_shard_group is not None or self.shards_wait:
            return {}  # no rank reaches all shards

        def allocate() -> None:
            found.update({dtype: memory.empty(size, dtype) for dtype, size in sizes.items()})
            for mine, _ in found.values():
                mine.zero_()
            if not executor.weights.uses_epoch_lock():
                take_turns(executor, memory)

        if not self.attempt(allocate):
            self.memory = None
            return {}
        return found

    def shards_moved(self, everywhere: dict[torch.dtype, tuple[Tensor, list[Tensor]]]) -> None:
        """All shards lie in this memory now, and in none that was allocated for them before, which goes: an optimizer
        with two groups of parameters has them placed twice."""
        before, self._shards = self._shards, [mine for mine, _ in everywhere.values()]
        if self.memory is not None:
            for mine in before:
                self.memory.let_go(mine)

    def shards_leave(self) -> None:
        """No rank reaches shards from now on; before one did. Collectives move weights."""
        self.shards_wait, self.memory, self.reason = False, None, "a memory plan has put master weights on the host"

    def allocate_compute_shards(self, executor: Executor, allocate: Callable[[SymmetricMemory | None], None]) -> None:
        """Calls ``allocate`` with peers' memory for copies of shards, or with None where peers gather these.

        Raises:
            UnsupportedError: on every rank, when there is not enough and weights must be copied.
        """
        memory = self.memory
        if memory is not None and self.attempt(lambda: allocate(memory)):
            return
        if not executor.weights.uses_epoch_lock():  # otherwise shards are read, and cast
            self.memory = None
            allocate(None)
