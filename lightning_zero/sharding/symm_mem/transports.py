"""Choose how weights and gradients are moved: by copies in symmetric memory or by collectives.

:class:`PeerTransports` combines both choices. All decisions are the same on every rank. If symmetric memory runs out,
collectives take over, unless the user chose ``"copy"``.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import cannot_change_error
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh, RankGroup
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.symm_mem.symmetric_memory import SymmetricMemory

log = logging.getLogger(__name__)


AllocateShards = Callable[[torch.dtype | None, SymmetricMemory | None], None]


class TransportChoice(ABC):
    """Choose the transport of weights or of gradients.

    Attributes:
        option: name of the tuning option by which users choose.
        memory: symmetric memory that is copied from or to; None: collectives are used.
        reason: why there is none, although copies were wanted.
    """

    kind: ClassVar[str]
    option: ClassVar[str]

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.memory: SymmetricMemory | None = None
        self.reason = ""
        self._choice: str = getattr(config.tuning, self.option)

    @abstractmethod
    def wants_copies(self, config: EngineConfig) -> bool:
        """Return True if these options mean copies, given that memory is available."""

    def set_memory(self, memory: SymmetricMemory | None, reason: str) -> None:
        if self._choice == "copy" and reason:
            raise self._impossible(reason)
        self.memory, self.reason = memory, reason

    def try_allocate(self, allocate: Callable[[], None]) -> bool:
        """Return True if ``allocate`` succeeds on all ranks. Collective.

        Otherwise free its memory; the caller switches to collectives.

        The result is the same on every rank.

        Raises:
            UnsupportedError: on every rank, if memory runs out and the user chose ``"copy"``.
        """
        assert self.memory is not None
        try:
            with self.memory.all_or_nothing():
                allocate()
            return True
        except UnsupportedError as error:  # on every rank
            if self._choice == "copy":
                raise self._impossible(str(error)) from error
            self.reason = str(error)
            if self.mesh.rank == 0:
                log.warning(
                    "Transport: collectives move all %s from now on, which is slower (reason=%s).", self.kind, error
                )
            return False

    def check(self, config: EngineConfig) -> None:
        """Raise :class:`UnsupportedError` if these options need a transport other than the present one."""
        before, now = self._choice, getattr(config.tuning, self.option)
        if now != before and self.wants_copies(config) != (self.memory is not None):
            raise cannot_change_error(self.option, before, now)

    def configure(self, config: EngineConfig) -> None:
        """Set options that :meth:`check` accepts."""
        self._choice = getattr(config.tuning, self.option)

    def describe(self) -> str:
        """Describe the transport, and why it is not by copies."""
        if self.memory is not None:
            return (
                "copies in memory that all ranks of a host can read"
                if self.mesh.inter_host
                else "copies in memory that all ranks can read"
            )
        return f"collectives ({self.reason or f'{self.option}={self._choice!r} means that on this device'})"

    def _impossible(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.option}='copy' is impossible here: {reason}. Use {self.option}='auto' to copy if that is possible."
        )


def chooses_copies(choice: str, device: torch.device, usable: bool, on_cpu: bool) -> bool:
    """Return True if ``choice`` ("auto", "copy" or "collective") means copies on this device.

    ``usable`` tells if copies are useful on an accelerator, ``on_cpu`` if "auto" means them between CPUs.
    """
    if device.type == "cpu":
        return choice == "copy" or (choice == "auto" and on_cpu)
    # Before CUDA 13 each copy is a driver call, which costs more host time than the copies save on the device.
    one_call = device.type == "cuda" and (torch.version.cuda or "").split(".")[0] == "13"
    return choice == "copy" or (choice == "auto" and usable and one_call)


class WeightTransport(TransportChoice):
    """Choose how weights are gathered, and allocate shards in symmetric memory."""

    kind, option = "weights", "gather_transport"

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._masters_on_host = "parameters" in config.offload
        # A memory plan, made after the optimizers are known, may move master weights.
        self.placement_is_pending = config.memory is not None
        self._shards: list[Tensor] = []  # this rank's memory of the shards

    def wants_copies(self, config: EngineConfig) -> bool:
        if "parameters" in config.offload:
            return False
        return chooses_copies(config.tuning.gather_transport, self.mesh.device, usable=config.compile, on_cpu=True)

    def set_memory(self, memory: SymmetricMemory | None, reason: str) -> None:
        super().set_memory(memory, "offload= stores master weights on the host" if self._masters_on_host else reason)

    def allocate_shards(
        self,
        executor: Executor,
        sizes: dict[torch.dtype, int],
        set_epoch_lock: Callable[[Executor, SymmetricMemory], None],
    ) -> dict[torch.dtype, tuple[Tensor, list[Tensor]]]:
        """Allocate zeros by dtype: this rank's memory, and that of all ranks. Collective.

        Returns an empty dict if shards are in ordinary memory. Raises UnsupportedError on every rank if memory runs out
        and weights must be copied.
        """
        memory, found = self.memory, {}
        if memory is None or self.mesh.inter_host_shard_group is not None or self.placement_is_pending:
            return {}  # no rank reaches all shards, or they may still move

        def allocate() -> None:
            found.update({dtype: memory.empty(size, dtype) for dtype, size in sizes.items()})
            for mine, _ in found.values():
                mine.zero_()
            if not executor.weights.uses_epoch_lock():
                set_epoch_lock(executor, memory)

        if not self.try_allocate(allocate):
            self.memory = None
            return {}
        return found

    def set_shard_memory(self, everywhere: dict[torch.dtype, tuple[Tensor, list[Tensor]]]) -> None:
        """Record the memory that all shards are in now, and free their former memory.

        An optimizer with two parameter groups makes the engine place the shards twice.
        """
        before, self._shards = self._shards, [mine for mine, _ in everywhere.values()]
        if self.memory is not None:
            for mine in before:
                self.memory.free(mine)

    def move_shards_to_host(self) -> None:
        """Use collectives from now on, because no rank reaches shards in another rank's host memory."""
        self.placement_is_pending, self.memory = False, None
        self.reason = "a memory plan stores master weights on the host"

    def allocate_compute_shards(self, executor: Executor, allocate: Callable[[SymmetricMemory | None], None]) -> None:
        memory = self.memory
        if memory is not None and self.try_allocate(lambda: allocate(memory)):
            return
        if not executor.weights.uses_epoch_lock():  # with the lock, ranks copy master shards and cast them
            self.memory = None
            allocate(None)


class GradientTransport(TransportChoice):
    """Choose how gradients are reduced, and allocate the staging memory of copies."""

    kind, option = "gradients", "reduce_transport"

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._staged = False

    def wants_copies(self, config: EngineConfig) -> bool:
        return chooses_copies(config.tuning.reduce_transport, self.mesh.device, usable=True, on_cpu=False)

    def stage(self, executor: Executor, bucket_mb: float) -> None:
        """Allocate two buckets of ``bucket_mb`` MiB that peers write to. May be repeated. Collective."""
        memory = self.memory
        if memory is None or self._staged:
            return
        self._staged = self.try_allocate(lambda: self._stage(executor, memory, bucket_mb))
        if not self._staged:
            self.memory = None

    def _stage(self, executor: Executor, memory: SymmetricMemory, bucket_mb: float) -> None:
        unit = executor.transport.staging_unit
        size = max(1, math.ceil(2 * bucket_mb * 2**20 / unit)) * unit
        mine, others = memory.empty(size, torch.uint8)
        staging = [mine if rank == self.mesh.intra_host.rank else other for rank, other in enumerate(others)]
        executor.transport.set_staging(staging, self.mesh.intra_host.gather_group, self.mesh.timeout_s)
        if executor.device.type == "cuda":
            try:
                executor.transport.compile_means()
            except RuntimeError as error:
                level = logging.WARNING if executor.rank == 0 else logging.DEBUG
                log.log(level, "Transport: the slower torch kernels add gradients (reason=%s)", error)


BARRIERS = 2  # on devices: one for gradients, one for weights


class SignalPads:
    """Give the executor small integer tensors that all ranks of a host write.

    They are used for barriers, epoch locks and remote signals. All methods raise UnsupportedError on every rank if
    memory runs out, or if a rank cannot compile the kernels.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._intra_host = mesh.intra_host
        self._barrier = False

    def set_barrier(self, executor: Executor, memory: SymmetricMemory | None) -> None:
        """Use our own kernel for barriers on devices. May be repeated. Collective."""
        if memory is None or self._barrier or executor.device.type != "cuda":
            return
        self._barrier = True
        if error := self._share_zeros(
            memory, executor, BARRIERS * self._intra_host.size, executor.transport.set_barrier
        ):
            raise UnsupportedError(
                f"The kernel of barriers between devices cannot be compiled ({error}). Pass "
                "gather_transport='collective' and reduce_transport='collective' to the strategy."
            )

    def set_epoch_lock(self, executor: Executor, memory: SymmetricMemory) -> None:
        """Let ranks alternate between reading and writing shards. Collective."""
        if executor.device.type == "cpu":
            executor.transport.set_epoch_lock(memory.empty(1, torch.int64)[1])
        elif error := self._share_zeros(memory, executor, self._intra_host.size, executor.transport.set_epoch_lock):
            raise UnsupportedError(f"the kernels by which ranks take turns cannot be compiled ({error})")

    def set_remote_signals(self, executor: Executor, memory: SymmetricMemory | None) -> None:
        """Signal the arrival of each part from other hosts to the ranks that read it. Collective.

        With ``memory`` these are all ranks of the host; without, only this rank.
        """
        take = executor.transport.set_remote_signals
        if executor.device.type == "cpu":
            if memory is not None:
                take(memory.empty(1, torch.int64)[1])
        elif memory is not None:
            if error := self._share_zeros(memory, executor, self._intra_host.size, take):
                raise UnsupportedError(f"the kernels by which ranks wait for other hosts cannot be compiled ({error})")
        else:
            try:
                take([torch.zeros(1, dtype=torch.int32, device=executor.device)])
            except RuntimeError as error:
                log.debug(
                    "Transport: CUDA graphs wait for all data of other hosts before they begin (reason=%s)", error
                )

    def _share_zeros(
        self, memory: SymmetricMemory, executor: Executor, numel: int, use: Callable[[list[Tensor]], None]
    ) -> str | None:
        """Call ``use`` with int32 zeros of each rank of the host, which all can write; return a rank's error.
        Collective.

        The error exchange is also the barrier after which all pads are zero.
        """
        mine, all_ranks = memory.empty(numel, torch.int32)
        mine.zero_()
        torch.cuda.synchronize(executor.device)
        error = None
        try:
            use([mine if rank == self._intra_host.rank else other for rank, other in enumerate(all_ranks)])
        except RuntimeError as failure:
            error = str(failure)
        return memory.first_rank_error(error)


class PeerTransports:
    """Combine the transports of weights and gradients."""

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        self._config = config
        self._weights, self._gradients = WeightTransport(config, mesh), GradientTransport(config, mesh)
        self._signal_pads = SignalPads(mesh)
        self._several_hosts = mesh.inter_host is not None
        self._gathers_across_hosts = mesh.inter_host_shard_group is not None
        self._one_rank_per_host = mesh.intra_host.size == 1
        replicas = self._several_hosts and not self._gathers_across_hosts
        # gloo reduces in place, and so do replicas of one rank each.
        self._adds_in_place = mesh.device.type == "cpu" or self._one_rank_per_host and replicas
        self._copied = False  # compute shards were allocated
        self._connected: list[RankGroup] = []
        self._reported_transports = self._transports_used

    @classmethod
    def of(cls, config: EngineConfig, mesh: Mesh) -> PeerTransports:
        """Return the transports that the options lead to, the same on every rank. Collective."""
        peers = cls(config, mesh)
        weights, gradients = peers._weights, peers._gradients
        wanted = [choice.wants_copies(config) for choice in (weights, gradients)]
        memory, reason = SymmetricMemory.of(mesh) if any(wanted) else (None, "")
        weights.set_memory(memory if wanted[0] else None, reason)
        gradients.set_memory(memory if wanted[1] else None, reason)
        if reason and mesh.rank == 0:
            log.debug("Transport: collectives for all weights and gradients (reason=%s)", reason)
        peers._reported_transports = peers._transports_used
        return peers

    @property
    def weight_memory(self) -> SymmetricMemory | None:
        """Return the memory of compute shards that compiled code copies; None: weights are all-gathered."""
        return self._weights.memory

    @property
    def gradient_memory(self) -> SymmetricMemory | None:
        """Return the memory that gradients are copied to; None: they are reduce-scattered."""
        return self._gradients.memory

    @property
    def zero_copy_gradients(self) -> bool:
        """Return True if gradients may be sent from their own memory.

        Compiled code must not touch them for a while.
        """
        return self.gradient_memory is not None or not self._adds_in_place

    def describe(self) -> dict[str, str]:
        """Describe the transports of weights and gradients, and why they are not copies."""
        by_kind = {choice.kind: choice.describe() for choice in (self._weights, self._gradients)}
        if not self._several_hosts:
            return by_kind
        if not self._gathers_across_hosts:
            return {
                "weights": f"{by_kind['weights']}; between hosts not at all: each holds them",
                "gradients": f"{by_kind['gradients']}; between hosts by all-reduces of the result of each host",
            }
        if not self._wants_copies:
            by_kind["weights"] = "collectives"
        elif self._one_rank_per_host:
            by_kind["weights"] = "read from host shards (there is one rank on each host)"
        often = (
            "once per optimizer step, concurrently with the first layers" if self._wants_copies else "for each gather"
        )
        inter_host = {
            "weights": f"by all-gathers, {often}",
            "gradients": "by reduce-scatters of the result of each host",
        }
        return {kind: f"{how}; between hosts {inter_host[kind]}" for kind, how in by_kind.items()}

    def check(self, config: EngineConfig) -> None:
        """Raise :class:`UnsupportedError` if these options need transports other than the present ones."""
        for choice in (self._weights, self._gradients):
            choice.check(config)

    def configure(self, config: EngineConfig) -> None:
        """Set options that :meth:`check` accepts."""
        for choice in (self._weights, self._gradients):
            choice.configure(config)
        self._config = config

    def allocate(self, executor: Executor, compute_shards: AllocateShards, host_shards: AllocateShards) -> bool:
        """Allocate memory for gradients in transit, and for compute shards. May be repeated. Collective.

        ``compute_shards`` and ``host_shards`` allocate shards, given the compute dtype and symmetric memory or None.
        Returns True if memory ran out and collectives have taken over.
        """
        self._signal_pads.set_barrier(executor, self.gradient_memory or self.weight_memory)
        self._gradients.stage(executor, self._config.tuning.reduce_bucket_mb)
        self.connect(executor)
        if self._wants_copies and not self._copied:
            self._copied = True
            allocate = partial(self._allocate_copies, executor, compute_shards, host_shards)
            self._weights.allocate_compute_shards(executor, allocate)
        before, self._reported_transports = self._reported_transports, self._transports_used
        return before != self._reported_transports

    def connect(self, executor: Executor) -> None:
        """Connect the process groups that reduce gradients. May be repeated. Collective.

        A group connects in its first collective. In the middle of backward that would block where the watchdog cannot
        abort.
        """
        mesh = self._gradients.mesh
        if executor.device.type == "cpu":
            return
        for side in (mesh.inter_host, None if self.gradient_memory is not None else mesh.intra_host):
            if side is not None and side not in self._connected:
                executor.collective(
                    "ranks that reduce gradients", SequenceId.REDUCE, partial(_connect_side, side, executor.device)
                )
                self._connected.append(side)

    @property
    def _wants_copies(self) -> bool:
        config = self._config
        if not config.compile:
            return False
        if self._gathers_across_hosts:
            return config.tuning.compute_shard_group == "host"
        return config.compute_dtype is not None

    def _allocate_copies(
        self,
        executor: Executor,
        compute_shards: AllocateShards,
        host_shards: AllocateShards,
        memory: SymmetricMemory | None,
    ) -> None:
        dtype = self._config.compute_dtype
        if self._gathers_across_hosts:
            self._signal_pads.set_remote_signals(executor, memory)
            host_shards(dtype, memory)
        elif dtype is not None:
            compute_shards(dtype, memory)

    def allocate_shards(
        self, executor: Executor, sizes: dict[torch.dtype, int]
    ) -> dict[torch.dtype, tuple[Tensor, list[Tensor]]]:
        """Allocate memory for the shards, see :meth:`WeightTransport.allocate_shards`. Collective."""
        return self._weights.allocate_shards(executor, sizes, self._set_epoch_lock)

    def set_shard_memory(self, everywhere: dict[torch.dtype, tuple[Tensor, list[Tensor]]]) -> None:
        """Record that all shards are in the result of the last :meth:`allocate_shards`."""
        self._weights.set_shard_memory(everywhere)

    @property
    def placement_is_pending(self) -> bool:
        """Return True if shards stay in ordinary memory until :meth:`finalize_placement`.

        A memory plan may move them.
        """
        return self.weight_memory is not None and self._weights.placement_is_pending

    def finalize_placement(self) -> None:
        """Let the next placement of shards be the last one. Call it on every rank."""
        self._weights.placement_is_pending = False

    def move_shards_to_host(self) -> None:
        """Use collectives for weights, because shards move to host memory.

        The caller recompiles what depends on the transport.
        """
        self._weights.move_shards_to_host()
        self._reported_transports = self._transports_used

    def _set_epoch_lock(self, executor: Executor, memory: SymmetricMemory) -> None:
        self._signal_pads.set_barrier(executor, self.gradient_memory or self.weight_memory)
        self._signal_pads.set_epoch_lock(executor, memory)

    @property
    def _transports_used(self) -> tuple[bool, ...]:
        return self.weight_memory is not None, self.gradient_memory is not None

    @property
    def collectives_used(self) -> str:
        """Describe what process groups move; empty if they move nothing."""
        by_collective = [choice.kind for choice in (self._weights, self._gradients) if choice.memory is None]
        if by_collective:
            return f"{' and '.join(by_collective)} use collectives"
        return "gradients use collectives between hosts" if self._several_hosts else ""

    def no_capture_reason(self, executor: Executor) -> str:
        """Return the reason why CUDA graphs cannot capture these transports; empty if they can."""
        reason = executor.graphs.no_collectives_reason() if self.collectives_used else ""
        return f"{self.collectives_used}, and {reason}" if reason else ""

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's symmetric memory."""
        return sum(memory.nbytes for memory in {self.weight_memory, self.gradient_memory} if memory is not None)


def _connect_side(side: RankGroup, device: torch.device, later: bool) -> dist.Work | None:
    torch.accelerator.empty_cache()  # a communicator cannot use what the caching allocator keeps
    return dist.all_reduce(torch.zeros(1, device=device), group=side.reduce_group, async_op=later)
