"""What ranks copy out of, and into, each other's memory, all of it together; the rest goes through process groups."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh, RankGroup
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.symm_mem.gradients import GradientTransport
from lightning_zero.sharding.symm_mem.memory import SymmetricMemory
from lightning_zero.sharding.symm_mem.signal_pads import SignalPads
from lightning_zero.sharding.symm_mem.weights import WeightTransport

if TYPE_CHECKING:
    from lightning_zero.sharding.memory import ShardMemory

__all__ = ["PeerTransports"]

log = logging.getLogger(__name__)


class PeerTransports:
    """The ways of weights and of gradients, and what they share.

    Args:
        config: options.
        mesh: of the ranks.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        self._config = config
        self._weights, self._gradients = WeightTransport(config, mesh), GradientTransport(config, mesh)
        self._rows = SignalPads(mesh)
        self._several_hosts = mesh.inter_host is not None
        self._exchange = mesh.inter_host_shard_group is not None
        self._alone = mesh.intra_host.size == 1
        replicas = self._several_hosts and not self._exchange
        # gloo does, and so do replicas of one rank each.
        self._adds_in_place = mesh.device.type == "cpu" or self._alone and replicas
        self._copied = False  # whether compute copies were asked for
        self._met: list[RankGroup] = []  # whose groups for gradients are connected
        self._told = self._ways

    @classmethod
    def of(cls, config: EngineConfig, mesh: Mesh) -> PeerTransports:
        """What the options come to, the same on every rank. Collective.

        Raises:
            UnsupportedError: ``"copy"`` where that is impossible.
        """
        peers = cls(config, mesh)
        weights, gradients = peers._weights, peers._gradients
        wanted = [way.copies(config) for way in (weights, gradients)]
        memory, reason = SymmetricMemory.of(mesh) if any(wanted) else (None, "")
        weights.use(memory if wanted[0] else None, reason)
        gradients.use(memory if wanted[1] else None, reason)
        if reason and mesh.rank == 0:
            log.info("Collectives move all weights and gradients: %s.", reason)
        peers._told = peers._ways
        return peers

    @property
    def weight_memory(self) -> SymmetricMemory | None:
        """Where copies of shards lie that compiled code fetches; None: weights are all-gathered."""
        return self._weights.memory

    @property
    def gradient_memory(self) -> SymmetricMemory | None:
        """Where gradients are copied to; None: they are reduce-scattered."""
        return self._gradients.memory

    @property
    def zero_copy_gradients(self) -> bool:
        """Whether gradients that compiled code leaves alone for a while are sent from where they lie."""
        return self.gradient_memory is not None or not self._adds_in_place

    def describe(self) -> dict[str, str]:
        """How weights and gradients travel, and why not by copies, in words."""
        told = {way.what: way.describe() for way in (self._weights, self._gradients)}
        if not self._several_hosts:
            return told
        if not self._exchange:
            return {
                "weights": f"{told['weights']}; between hosts not at all: each holds them",
                "gradients": f"{told['gradients']}; between hosts by all-reduces of what each host has reduced",
            }
        if not self._wants_copies:
            told["weights"] = "collectives"
        elif self._alone:
            told["weights"] = "read where they lie (there is one rank on each host)"
        often = "once per optimizer step, beside the first layers" if self._wants_copies else "for each gather"
        inter_host = {
            "weights": f"by all-gathers, {often}",
            "gradients": "by reduce-scatters of what each host has reduced",
        }
        return {what: f"{how}; between hosts {inter_host[what]}" for what, how in told.items()}

    def check(self, config: EngineConfig) -> None:
        """Raises :class:`UnsupportedError` where other options want something else to be copied than was settled when
        the model was sharded."""
        for way in (self._weights, self._gradients):
            way.check(config)

    def configure(self, config: EngineConfig) -> None:
        """Options that :meth:`check` has nothing against."""
        for way in (self._weights, self._gradients):
            way.configure(config)
        self._config = config

    def allocate(self, memory: ShardMemory) -> bool:
        """Memory for gradients on their way, and for weights in the dtype that is computed in. Where there is not
        enough that peers can reach, collectives move them from now on: returns whether that has happened. Harmless when
        repeated. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough for what must be copied.
        """
        executor = memory.executor
        self._rows.set_barrier(executor, self.gradient_memory or self.weight_memory)
        self._gradients.stage(executor, self._config.tuning.reduce_bucket_mb)
        self.connect(executor)
        if self._wants_copies and not self._copied:
            self._copied = True
            self._weights.allocate_compute_shards(executor, lambda peers: self._allocate_copies(memory, peers))
        before, self._told = self._told, self._ways
        return before != self._told

    def connect(self, executor: Executor) -> None:
        """Ranks that reduce gradients by collectives meet. On an accelerator their group connects with the first: in
        the middle of backward that would be a wait that the watchdog cannot end. Harmless when repeated. Collective."""
        mesh = self._gradients.mesh
        if executor.device.type == "cpu":
            return
        for side in (mesh.inter_host, None if self.gradient_memory is not None else mesh.intra_host):
            if side is not None and side not in self._met:
                executor.collective("ranks that reduce gradients", SequenceId.REDUCE, partial(_meet, side, executor.device))
                self._met.append(side)

    @property
    def _wants_copies(self) -> bool:
        config = self._config
        if not config.compile:
            return False
        if self._exchange:
            return config.tuning.compute_shard_group == "host"
        return config.compute_dtype is not None

    def _allocate_copies(self, memory: ShardMemory, peers: SymmetricMemory | None) -> None:
        dtype = self._config.compute_dtype
        if self._exchange:
            self._rows.tell_arrivals(memory.executor, peers)
            memory.allocate_host_shards(dtype, peers)
        elif dtype is not None:
            memory.allocate_compute_shards(dtype, peers)

    def allocate_shards(
        self, executor: Executor, sizes: dict[torch.dtype, int]
    ) -> dict[torch.dtype, tuple[Tensor, list[Tensor]]]:
        """Memory for the shards themselves, 1-D zeros of so many elements, by dtype: this rank's, and that of all
        ranks. Empty where shards are to lie in memory of their own. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough and weights must be copied.
        """
        return self._weights.allocate_shards(executor, sizes, self._take_turns)

    def shards_moved(self, everywhere: dict[torch.dtype, tuple[Tensor, list[Tensor]]]) -> None:
        """All shards lie in what :meth:`allocate_shards` gave last."""
        self._weights.shards_moved(everywhere)

    @property
    def shards_wait(self) -> bool:
        """Whether shards lie in memory of their own until :meth:`shards_settle`, since a plan may move them."""
        return self.weight_memory is not None and self._weights.shards_wait

    def shards_settle(self) -> None:
        """They are where they are to be once they are placed next. On every rank."""
        self._weights.shards_wait = False

    def shards_leave(self) -> None:
        """Likewise: on the host, from where no rank reaches another's, so collectives move weights. Whoever calls this
        sees to what depends on that."""
        self._weights.shards_leave()
        self._told = self._ways

    def _take_turns(self, executor: Executor, memory: SymmetricMemory) -> None:
        self._rows.set_barrier(executor, self.gradient_memory or self.weight_memory)
        self._rows.set_epoch_lock(executor, memory)

    @property
    def _ways(self) -> tuple[bool, ...]:
        return self.weight_memory is not None, self.gradient_memory is not None

    @property
    def collectives_used(self) -> str:
        """What goes through process groups, in words; empty where nothing does."""
        by_collective = [way.what for way in (self._weights, self._gradients) if way.memory is None]
        if by_collective:
            return f"{' and '.join(by_collective)} travel by collectives"
        return "gradients travel between hosts by collectives" if self._several_hosts else ""

    def no_capture_reason(self, executor: Executor) -> str:
        """Why graphs of the device cannot hold what moves weights and gradients here, in words; empty where they
        can."""
        reason = executor.graphs.no_collectives_reason() if self.collectives_used else ""
        return f"{self.collectives_used}, and {reason}" if reason else ""

    @property
    def nbytes(self) -> int:
        """Of this rank's memory that peers read or write."""
        return sum(memory.nbytes for memory in {self.weight_memory, self.gradient_memory} if memory is not None)


def _meet(side: RankGroup, device: torch.device, later: bool) -> dist.Work | None:
    torch.accelerator.empty_cache()  # a communicator finds no room in what the allocator keeps
    return dist.all_reduce(torch.zeros(1, device=device), group=side.reduce_group, async_op=later)
