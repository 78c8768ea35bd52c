"""Allocate memory that every rank of a host can read and write.

On GPUs of one host it is torch's symmetric memory: copy engines read it over NVLink, without a kernel that would take
SMs from the model. On a CPU it is shared memory of the operating system. Before first use, :func:`barrier_waits` checks
that a barrier between devices really waits. Some backends of torch's symmetric memory had one that did not, and copied
weights were silently wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat import cuda
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native.gpu_atomics import gpu_uuid, no_atomics_reason
from lightning_zero.sharding.shared_memory import Claim, map_shared

BACKEND = "CUDA"  # of torch's symmetric memory: NVSHMEM's barrier was an empty stub
PROBE_MS = 60_000  # timeout: all ranks arrive together, so a missing one has ended


class SymmetricMemory:
    """Allocate symmetric memory for the ranks of a mesh; create it by :meth:`of`.

    Ranks of one host reach each other's memory. Its availability is the same on all hosts, so that all ranks act alike.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._intra_host = mesh, mesh.intra_host
        self._device = mesh.device
        self._owners: list[Any] = []  # keep peers' memory mapped
        self._named = False  # CPU memory needs a name, see Claim
        self.nbytes = 0

    @classmethod
    def of(cls, mesh: Mesh) -> tuple[SymmetricMemory | None, str]:
        """Return an object, or None and the reason why there is no such memory. Collective.

        The result is identical on every rank.
        """
        if mesh.intra_host.size == 1:
            return None, "there is one rank" if mesh.inter_host is None else "there is one rank on each host"
        memory = cls(mesh)
        try:
            reason = memory._unavailable_reason() or memory._probe()
        except UnsupportedError as error:
            reason = str(error)
        return (memory, "") if reason is None else (None, reason)

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Allocate 1-D memory, and return this rank's and that of all ranks of its host in order. Collective.

        Raises:
            UnsupportedError: on every rank, if one has no such memory.
        """
        # Allocate, compare errors, then map: no rank may wait for one that has failed.
        if self._device.type == "cpu":
            found = self._shared(numel, dtype)
        else:
            try:
                mine = self._on_all_ranks(lambda: self._symmetric(numel, dtype), "allocated")
            except UnsupportedError:
                torch.cuda.empty_cache()  # symmetric memory cannot use what the caching allocator keeps
                mine = self._on_all_ranks(lambda: self._symmetric(numel, dtype), "allocated")
            found = self._on_all_ranks(lambda: self._rendezvous(mine, numel, dtype), "mapped")
        self.nbytes += numel * dtype.itemsize
        return found

    def free(self, mine: Tensor) -> None:
        """Free memory from :meth:`empty` that no rank uses any more; it goes with the last tensor in it."""
        self._owners = [owner for owner in self._owners if owner[1] is not mine]
        self.nbytes -= mine.nbytes

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Free everything that was allocated inside, if one allocation fails."""
        owners, nbytes = len(self._owners), self.nbytes
        try:
            yield
        except UnsupportedError:
            del self._owners[owners:]
            self.nbytes = nbytes
            raise

    def _on_all_ranks(self, job: Any, what: str, undo: Any = None) -> Any:
        error, result = None, None
        try:
            result = job()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        first = self.first_rank_error(error)
        if first is not None:
            if undo is not None and error is None:
                undo(result)
            raise UnsupportedError(f"memory that all ranks can read cannot be {what} {first}")
        return result

    def first_rank_error(self, error: str | None) -> str | None:
        """Return the first error that a rank reports, with the rank, or None. Collective.

        The result is identical on every rank.
        """
        first = self._mesh.first_rank_error(error)
        return None if first is None else "on rank {} ({})".format(*first)

    def _of_this_host(self, values: list[Any]) -> list[Any]:
        """Return the values of this host's ranks, out of all ranks' values."""
        return [values[rank] for rank in self._intra_host.ranks]

    def _unavailable_reason(self) -> str | None:
        physical_hosts = self._mesh.physical_hosts
        for rank, host in enumerate(self._mesh.hosts):
            first = self._mesh.hosts.index(host)
            if physical_hosts[first] != physical_hosts[rank]:
                return f"ranks {first} and {rank} are on different hosts"
        if self._device.type != "cuda":
            return None
        uuids = self._of_this_host(
            self._mesh.all_gather_values(self._on_all_ranks(lambda: gpu_uuid(self._device), "identified"))
        )
        mine = self._on_all_ranks(
            lambda: _other_backend(self._device) or no_atomics_reason(self._device, uuids), "judged"
        )
        return next(filter(None, self._mesh.all_gather_values(mine)), None)

    def _probe(self) -> str | None:
        mine, everyone = self.empty(self._intra_host.size, torch.int64)
        waits = barrier_waits(mine, everyone, self._intra_host.rank, self._device_barrier, self._host_barrier)
        reasons = self._mesh.all_gather_values(None if waits else "a barrier between their devices does not wait")
        if self._device.type == "cuda":  # certain only after an allocation
            reasons += self._mesh.all_gather_values(_other_backend(self._device))
        return next(filter(None, reasons), None)

    def _host_barrier(self) -> None:
        dist.barrier(group=self._mesh.control_group)

    def _device_barrier(self) -> None:
        if self._device.type == "cuda":
            self._owners[-1][0].barrier(channel=0, timeout_ms=PROBE_MS)
        else:
            self._host_barrier()

    # -- GPUs

    def _symmetric(self, numel: int, dtype: torch.dtype) -> Tensor:
        from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

        return symmetric.empty(numel, dtype=dtype, device=self._device)

    def _rendezvous(self, mine: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

        handle = symmetric.rendezvous(mine, self._intra_host.gather_group.group_name)
        self._owners.append((handle, mine))
        return mine, [handle.get_buffer(rank, (numel,), dtype) for rank in range(self._intra_host.size)]

    # -- CPUs

    def _shared(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        nbytes = numel * dtype.itemsize
        claim = self._on_all_ranks(lambda: Claim.of(nbytes, self._named), "allocated", Claim.release)
        try:
            return self._on_all_ranks(lambda: self._map(claim, numel, dtype), "mapped")
        except UnsupportedError:
            if self._named:
                raise
            self._named = True  # processes may not open each other's descriptors
            return self._shared(numel, dtype)

    def _map(self, claim: Claim, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        claims = self._of_this_host(self._mesh.all_gather_values((claim.path, claim.identity)))
        try:
            tensors = [map_shared(path, identity, numel, dtype) for path, identity in claims]
        finally:
            self._host_barrier()
            claim.release()
        return tensors[self._intra_host.rank], tensors


def _other_backend(device: torch.device) -> str | None:
    """Return the reason why torch's symmetric memory cannot be used as it is configured, or None."""
    from lightning_zero.compat.symmetric_memory import symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend in (None, BACKEND):
        return None
    return (
        f"torch's symmetric memory is set to {backend!r}, whose barriers are not known to wait (unset TORCH_SYMMMEM, "
        f"or call torch.distributed._symmetric_memory.set_backend({BACKEND!r}) before anything uses it)"
    )


DELAY_S = 0.01
DELAY_CYCLES = 20_000_000  # about as long, of the device's clock


def barrier_waits(
    mine: Tensor, everyone: Sequence[Tensor], rank: int, meet: Callable[[], None], line_up: Callable[[], None]
) -> bool:
    """Return True if this rank sees a delayed rank's writes after a barrier. Collective.

    Args:
        mine: memory of this rank that all ranks can write: 1-D, int64, one element per rank.
        meet: the barrier to check, on the current stream of the device.
        line_up: a barrier on the host, which is known to wait.
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
        cuda.sleep(DELAY_CYCLES)
    else:
        time.sleep(DELAY_S)
