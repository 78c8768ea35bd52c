"""Memory of every rank that every rank can read, so that weights are fetched, and gradients sent, by plain copies.

On GPUs of one host it is torch's symmetric memory: copy engines read it over NVLink, without a kernel that would take
SMs from the model. On a CPU it is shared memory of the operating system.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.config.engine import settled
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.links import uuid_of, why_no_atomics
from lightning_zero.sharding.probe import barrier_waits
from lightning_zero.sharding.shared_memory import Claim, mapped

if TYPE_CHECKING:
    from lightning_zero.sharding.shard import Sharder

__all__ = ["PeerMemory", "Peers"]

log = logging.getLogger(__name__)

BACKEND = "CUDA"  # of torch's symmetric memory: NVSHMEM's barrier has been an empty stub
LANES = 2  # on which ranks meet on devices: gradients, weights
PROBE_MS = 60_000  # all ranks come at once: one that is not there then has ended


class Peers:
    """What ranks copy out of, and into, each other's memory; the rest goes through process groups.

    Attributes:
        for_weights: where shadows lie that compiled code copies; None: weights are all-gathered.
        for_gradients: where gradients are copied to; None: they are reduce-scattered.
    """

    def __init__(
        self, for_weights: PeerMemory | None, for_gradients: PeerMemory | None, config: EngineConfig, mesh: Mesh
    ) -> None:
        self.for_weights = for_weights
        self.for_gradients = for_gradients
        self._config = config
        self._mesh = mesh
        self._staged = self._barrier = self._shadowed = False
        self._told = self._ways

    @classmethod
    def of(cls, config: EngineConfig, mesh: Mesh) -> Peers:
        """What the options come to, the same on every rank. Collective.

        Raises:
            UnsupportedError: ``"copy"`` where that is impossible.
        """
        shadows, device = _has_shadows(config), mesh.device
        gather, reduce = config.tuning.gather_transport, config.tuning.reduce_transport
        wanted = [_wanted(gather, device, shadows, True), _wanted(reduce, device, True, False)]
        memory, reason = PeerMemory.of(mesh) if any(wanted) else (None, "")
        for name, choice in (("gather_transport", gather), ("reduce_transport", reduce)):
            here = reason
            if name == "gather_transport" and not shadows and device.type != "cpu":
                here = "only compiled code with mixed precision keeps weights where others can read them"
            if choice == "copy" and here:
                raise _impossible(name, here)
        if reason and mesh.rank == 0:
            log.info("Collectives move all weights and gradients: %s.", reason)
        return cls(memory if wanted[0] else None, memory if wanted[1] else None, config, mesh)

    def configure(self, config: EngineConfig) -> None:
        """Other options. What copies and what does not was settled when the model was sharded.

        Raises:
            UnsupportedError: it is to be otherwise.
        """
        shadows = _has_shadows(config)
        ways = {
            "gather_transport": (self.for_weights, shadows, True),
            "reduce_transport": (self.for_gradients, True, False),
        }
        for name, (memory, usable, on_cpu) in ways.items():
            before, now = getattr(self._config.tuning, name), getattr(config.tuning, name)
            copies = _wanted(now, self._mesh.device, usable, on_cpu)
            if now != before and copies != (memory is not None):
                raise settled(name, before, now)
        self._config = config

    def allocate(self, sharder: Sharder) -> bool:
        """Memory for gradients on their way, and for weights in the dtype that is computed in. Where there is not
        enough that peers can reach, collectives move them from now on: returns whether that has happened. Harmless when
        repeated. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough for what must be copied.
        """
        self._set_barrier(sharder.executor)
        memory = self.for_gradients
        if memory is not None and not self._staged:
            self._staged = self._tried("reduce_transport", lambda: self._stage(sharder.executor))
            self.for_gradients = memory if self._staged else None
        if self._config.compute_dtype is not None and self._config.compile and not self._shadowed:
            self._shadowed = True
            self._allocate_shadows(sharder, self._config.compute_dtype)
        before, self._told = self._told, self._ways
        return before != self._told

    @property
    def _ways(self) -> tuple[bool, bool]:
        return self.for_weights is not None, self.for_gradients is not None

    def _allocate_shadows(self, sharder: Sharder, dtype: torch.dtype) -> None:
        weights = self.for_weights
        if weights is not None and self._tried("gather_transport", lambda: sharder.allocate_shadows(dtype, weights)):
            return
        if not sharder.executor.weights.takes_turns():  # otherwise shards are read, and cast
            self.for_weights = None
            sharder.allocate_shadows(dtype)

    def allocate_shards(
        self, executor: Executor, sizes: dict[torch.dtype, int]
    ) -> dict[torch.dtype, tuple[Tensor, list[Tensor]]]:
        """Memory for the shards themselves, by dtype: this rank's, and that of all ranks. Empty where shards are to lie
        in memory of their own. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough and weights must be copied.
        """
        memory, found = self.for_weights, {}
        if memory is None:
            return {}

        def allocate() -> None:
            found.update({dtype: memory.empty(size, dtype) for dtype, size in sizes.items()})
            for mine, _ in found.values():
                mine.zero_()
            if not executor.weights.takes_turns():
                self._take_turns(executor, memory)

        if not self._tried("gather_transport", allocate):
            self.for_weights = None
            return {}
        return found

    def _take_turns(self, executor: Executor, memory: PeerMemory) -> None:
        if executor.device.type == "cpu":
            executor.transport.take_turns(memory.empty(1, torch.int64)[1])
            return
        self._set_barrier(executor)
        if error := _given_rows(memory, executor, executor.world_size, executor.transport.take_turns):
            raise UnsupportedError(f"the kernels by which ranks take turns cannot be compiled ({error})")

    def _set_barrier(self, executor: Executor) -> None:
        """Lets ranks meet on their devices by our own kernel."""
        memory = self.for_gradients or self.for_weights
        if memory is None or self._barrier or executor.device.type != "cuda":
            return
        self._barrier = True
        if error := _given_rows(memory, executor, LANES * executor.world_size, executor.transport.set_barrier):
            raise UnsupportedError(
                f"The kernel by which ranks meet on their devices cannot be compiled ({error}). Pass "
                "gather_transport='collective' and reduce_transport='collective' to the strategy."
            )

    def _tried(self, name: str, allocate: Callable[[], None]) -> bool:
        memory = self.for_weights if name == "gather_transport" else self.for_gradients
        assert memory is not None
        try:
            with memory.all_or_nothing():
                allocate()
            return True
        except UnsupportedError as error:  # on every rank
            if getattr(self._config.tuning, name) == "copy":
                raise _impossible(name, str(error)) from error
            if self._mesh.rank == 0:
                what = {"gather_transport": "weights", "reduce_transport": "gradients"}[name]
                log.warning("Collectives move all %s from now on, which is slower: %s.", what, error)
            return False

    def _stage(self, executor: Executor) -> None:
        """Two buckets' worth."""
        assert self.for_gradients is not None
        unit = executor.transport.staging_unit
        size = max(1, math.ceil(2 * self._config.tuning.reduce_bucket_mb * 2**20 / unit)) * unit
        mine, others = self.for_gradients.empty(size, torch.uint8)
        staging = [mine if rank == executor.rank else memory for rank, memory in enumerate(others)]
        executor.transport.set_staging(staging, self._mesh.shard_group, self._mesh.timeout_s)
        if executor.device.type == "cuda":
            try:
                executor.transport.compile_means()
            except RuntimeError as error:
                level = logging.WARNING if executor.rank == 0 else logging.DEBUG
                log.log(level, "Pushed gradients are added up by torch's own kernels, which take longer: %s", error)

    @property
    def missing(self) -> str:
        """What goes through process groups, in words; empty where nothing does."""
        ways = {"weights": self.for_weights, "gradients": self.for_gradients}
        by_collective = [what for what, memory in ways.items() if memory is None]
        return f"{' and '.join(by_collective)} travel by collectives" if by_collective else ""

    @property
    def nbytes(self) -> int:
        """Of this rank's memory that peers read or write."""
        return sum(memory.nbytes for memory in {self.for_weights, self.for_gradients} if memory is not None)


def _given_rows(memory: PeerMemory, executor: Executor, numel: int, use: Callable[[list[Tensor]], None]) -> str | None:
    """Gives ``use`` zeros of each rank, int32 that all ranks can write; returns a rank's error. Ranks meet in one way
    or in another, and nobody before all rows are zero. Collective."""
    mine, all_ranks = memory.empty(numel, torch.int32)
    mine.zero_()
    torch.cuda.synchronize(executor.device)
    error = None
    try:
        use([mine if rank == executor.rank else other for rank, other in enumerate(all_ranks)])
    except RuntimeError as failure:
        error = str(failure)
    return memory.first_error(error)


def _wanted(choice: str, device: torch.device, usable: bool, on_cpu: bool) -> bool:
    if device.type == "cpu":
        return choice == "copy" or (choice == "auto" and on_cpu)
    # Before CUDA 13 each piece takes a call of the driver: more of the host's time than copies save on the device.
    one_call = device.type == "cuda" and (torch.version.cuda or "").split(".")[0] == "13"
    return choice == "copy" or (choice == "auto" and usable and one_call)


def _has_shadows(config: EngineConfig) -> bool:
    return config.compute_dtype is not None and config.compile and config.tuning.prefetch


def _impossible(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}='copy' is impossible here: {reason}. Use {name}='auto' to copy where that is possible."
    )


class PeerMemory:
    """Allocates such memory for the ranks of a process group; see :meth:`of`.

    Args:
        mesh: of the ranks whose memory it is.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device = mesh.device
        self._owners: list[Any] = []  # what keeps peers' memory mapped
        self._named = False  # whether memory of the CPU needs a name
        self.nbytes = 0  # of this rank's

    @classmethod
    def of(cls, mesh: Mesh) -> tuple[PeerMemory | None, str]:
        """This memory if there can be any, or None and the reason. The same on every rank. Collective."""
        if mesh.world_size == 1:
            return None, "there is one rank"
        memory = cls(mesh)
        try:
            reason = memory._objection() or memory._probe()
        except UnsupportedError as error:
            reason = str(error)
        return (memory, "") if reason is None else (None, reason)

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """1-D memory of this rank, and that of all ranks in their order, this one's included. Collective.

        Raises:
            UnsupportedError: on every rank, when one has no such memory.
        """
        # In two steps: no rank may wait for one that has failed.
        if self._device.type == "cpu":
            found = self._shared(numel, dtype)
        else:
            try:
                mine = self._all(lambda: self._symmetric(numel, dtype), "allocated")
            except UnsupportedError:
                torch.cuda.empty_cache()  # on every rank: what the allocator keeps is lost for symmetric memory
                mine = self._all(lambda: self._symmetric(numel, dtype), "allocated")
            found = self._all(lambda: self._rendezvous(mine, numel, dtype), "mapped")
        self.nbytes += numel * dtype.itemsize
        return found

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What was allocated inside is given back when there was not enough for all of it."""
        owners, nbytes = len(self._owners), self.nbytes
        try:
            yield
        except UnsupportedError:
            del self._owners[owners:]
            self.nbytes = nbytes
            raise

    def _all(self, job: Any, what: str, undo: Any = None) -> Any:
        error, result = None, None
        try:
            result = job()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        first = self.first_error(error)
        if first is not None:
            if undo is not None and error is None:
                undo(result)
            raise UnsupportedError(f"memory that all ranks can read cannot be {what} {first}")
        return result

    def first_error(self, error: str | None) -> str | None:
        """The first that a rank reports, and on which, the same on every rank; None if none does. Collective."""
        errors = self._mesh.gathered(error)
        return next((f"on rank {rank} ({text})" for rank, text in enumerate(errors) if text is not None), None)

    def _objection(self) -> str | None:
        """Why nothing should even be tried."""
        hosts = self._mesh.hosts
        other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
        if other is not None:
            return f"ranks 0 and {other} are on different hosts"
        if self._device.type != "cuda":
            return None
        uuids = self._mesh.gathered(self._all(lambda: uuid_of(self._device), "identified"))
        mine = self._all(lambda: _other_backend(self._device) or why_no_atomics(self._device, uuids), "judged")
        return next(filter(None, self._mesh.gathered(mine)), None)

    def _probe(self) -> str | None:
        mine, everyone = self.empty(self._mesh.world_size, torch.int64)
        waits = barrier_waits(mine, everyone, self._mesh.rank, self._meet, self._line_up)
        reasons = self._mesh.gathered(None if waits else "a barrier between their devices does not wait")
        if self._device.type == "cuda":  # known for certain only now that there is some memory
            reasons += self._mesh.gathered(_other_backend(self._device))
        return next(filter(None, reasons), None)

    def _line_up(self) -> None:
        dist.barrier(group=self._mesh.control_group)

    def _meet(self) -> None:
        if self._device.type == "cuda":
            self._owners[-1][0].barrier(channel=0, timeout_ms=PROBE_MS)
        else:
            self._line_up()

    # -- GPUs

    def _symmetric(self, numel: int, dtype: torch.dtype) -> Tensor:
        from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

        return symmetric.empty(numel, dtype=dtype, device=self._device)

    def _rendezvous(self, mine: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

        handle = symmetric.rendezvous(mine, self._mesh.shard_group.group_name)
        self._owners.append((handle, mine))
        return mine, [handle.get_buffer(rank, (numel,), dtype) for rank in range(self._mesh.world_size)]

    # -- CPUs

    def _shared(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        nbytes = numel * dtype.itemsize
        claim = self._all(lambda: Claim.of(nbytes, self._named), "allocated", Claim.release)
        try:
            return self._all(lambda: self._map(claim, numel, dtype), "mapped")
        except UnsupportedError:
            if self._named:
                raise
            self._named = True  # where processes may not look into each other
            return self._shared(numel, dtype)

    def _map(self, claim: Claim, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        claims = self._mesh.gathered((claim.path, claim.identity))
        try:
            tensors = [mapped(path, identity, numel, dtype) for path, identity in claims]
        finally:
            self._line_up()
            claim.release()
        return tensors[self._mesh.rank], tensors


def _other_backend(device: torch.device) -> str | None:
    """Why torch's symmetric memory is not to be used as it is set up."""
    from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend in (None, BACKEND):
        return None
    return (
        f"torch's symmetric memory is set to {backend!r}, whose barriers are not known to wait (unset TORCH_SYMMMEM, "
        f"or call torch.distributed._symmetric_memory.set_backend({BACKEND!r}) before anything uses it)"
    )
