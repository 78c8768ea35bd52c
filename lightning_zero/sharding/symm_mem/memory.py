"""Memory of every rank that every rank of its host can read and write.

On GPUs of one host it is torch's symmetric memory: copy engines read it over NVLink, without a kernel that would take
SMs from the model. On a CPU it is shared memory of the operating system.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native.links import gpu_uuid, no_atomics_reason
from lightning_zero.sharding.shared_memory import Claim, mapped
from lightning_zero.sharding.symm_mem.probe import barrier_waits

__all__ = ["SymmetricMemory"]

BACKEND = "CUDA"  # of torch's symmetric memory: NVSHMEM's barrier has been an empty stub
PROBE_MS = 60_000  # all ranks come at once: one that is not there then has ended


class SymmetricMemory:
    """Allocates such memory for the ranks of a mesh; see :meth:`of`. Ranks of one host reach each other's; whether
    there is any is the same on all hosts, so that all ranks do the same.

    Args:
        mesh: of the ranks whose memory it is.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._inside = mesh, mesh.intra_host
        self._device = mesh.device
        self._owners: list[Any] = []  # what keeps peers' memory mapped
        self._named = False  # whether memory of the CPU needs a name
        self.nbytes = 0  # of this rank's

    @classmethod
    def of(cls, mesh: Mesh) -> tuple[SymmetricMemory | None, str]:
        """This memory if there can be any, or None and the reason. The same on every rank. Collective."""
        if mesh.intra_host.size == 1:
            return None, "there is one rank" if mesh.inter_host is None else "there is one rank on each host"
        memory = cls(mesh)
        try:
            reason = memory._objection() or memory._probe()
        except UnsupportedError as error:
            reason = str(error)
        return (memory, "") if reason is None else (None, reason)

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """1-D memory of this rank, and that of all ranks of its host in their order, this one's included. Collective.

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

    def let_go(self, mine: Tensor) -> None:
        """Memory of this rank that :meth:`empty` gave, and that no rank uses any more, goes with the last tensor in
        it."""
        self._owners = [owner for owner in self._owners if owner[1] is not mine]
        self.nbytes -= mine.nbytes

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
        first = self.first_rank_error(error)
        if first is not None:
            if undo is not None and error is None:
                undo(result)
            raise UnsupportedError(f"memory that all ranks can read cannot be {what} {first}")
        return result

    def first_rank_error(self, error: str | None) -> str | None:
        """The first that a rank reports, and on which, in words; None if none does. The same on every rank.
        Collective."""
        first = self._mesh.first_rank_error(error)
        return None if first is None else "on rank {} ({})".format(*first)

    def _of_host(self, values: list[Any]) -> list[Any]:
        """Those of this rank's host, of all ranks' values."""
        return [values[rank] for rank in self._inside.ranks]

    def _objection(self) -> str | None:
        """Why nothing should even be tried."""
        physical_hosts = self._mesh.physical_hosts
        for rank, host in enumerate(self._mesh.hosts):
            first = self._mesh.hosts.index(host)
            if physical_hosts[first] != physical_hosts[rank]:
                return f"ranks {first} and {rank} are on different hosts"
        if self._device.type != "cuda":
            return None
        uuids = self._of_host(self._mesh.all_gather_values(self._all(lambda: gpu_uuid(self._device), "identified")))
        mine = self._all(lambda: _other_backend(self._device) or no_atomics_reason(self._device, uuids), "judged")
        return next(filter(None, self._mesh.all_gather_values(mine)), None)

    def _probe(self) -> str | None:
        mine, everyone = self.empty(self._inside.size, torch.int64)
        waits = barrier_waits(mine, everyone, self._inside.rank, self._meet, self._line_up)
        reasons = self._mesh.all_gather_values(None if waits else "a barrier between their devices does not wait")
        if self._device.type == "cuda":  # known for certain only now that there is some memory
            reasons += self._mesh.all_gather_values(_other_backend(self._device))
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

        handle = symmetric.rendezvous(mine, self._inside.gather_group.group_name)
        self._owners.append((handle, mine))
        return mine, [handle.get_buffer(rank, (numel,), dtype) for rank in range(self._inside.size)]

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
        claims = self._of_host(self._mesh.all_gather_values((claim.path, claim.identity)))
        try:
            tensors = [mapped(path, identity, numel, dtype) for path, identity in claims]
        finally:
            self._line_up()
            claim.release()
        return tensors[self._inside.rank], tensors


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
