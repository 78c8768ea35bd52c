"""Memory of every rank that every rank can read, so that weights are fetched, and gradients sent, by plain copies.

On GPUs of one host it is torch's symmetric memory: copy engines read it over NVLink, without a kernel that would take
multiprocessors from the model. On a CPU it is shared memory of the operating system.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = ["PeerMemory", "Peers"]

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class Peers:
    """What ranks copy out of, and into, each other's memory; the rest goes through process groups.

    Attributes:
        for_weights: where shadows lie that compiled code copies; None: weights are all-gathered.
        for_gradients: where gradients are copied to; None: they are reduce-scattered.
    """

    def __init__(self, for_weights: PeerMemory | None, for_gradients: PeerMemory | None) -> None:
        self.for_weights = for_weights
        self.for_gradients = for_gradients
        self._staged = False

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
    ) -> Peers:
        """What the options come to, the same on every rank. Collective.

        Raises:
            UnsupportedError: ``"copy"`` where that is impossible.
        """
        shadows = config.compute_dtype is not None and config.compile.enabled and config.compile.prefetch
        wanted = [_wanted(config.gather_by, device, shadows), _wanted(config.reduce_by, device, True)]
        memory, reason = PeerMemory.of(group, control_group, device) if any(wanted) else (None, "")
        for name, choice in (("gather_by", config.gather_by), ("reduce_by", config.reduce_by)):
            here = reason
            if name == "gather_by" and not shadows:
                here = "only compiled code with mixed precision keeps weights where others can read them"
            if choice == "copy" and here:
                raise UnsupportedError(
                    f"{name}='copy' is impossible here: {here}. Use {name}='auto' to copy where that is possible."
                )
        if reason and group.rank() == 0:
            log.info("Collectives move all weights and gradients: %s.", reason)
        return cls(memory if wanted[0] else None, memory if wanted[1] else None)

    def stage_gradients(self, executor: Executor, bucket_mb: float, timeout_s: float) -> None:
        """Memory for gradients on their way, two buckets' worth. Harmless when repeated. Collective."""
        if self.for_gradients is None or self._staged:
            return
        unit = 1024 * executor.world_size
        size = max(1, math.ceil(2 * bucket_mb * 2**20 / unit)) * unit
        mine, others = self.for_gradients.empty(size, torch.uint8)
        staging = [mine if rank == executor.rank else memory for rank, memory in enumerate(others)]
        executor.set_staging(staging, self.for_gradients.group, timeout_s)
        if executor.device.type == "cuda":
            try:
                executor.compile_means()
            except RuntimeError as error:
                level = logging.WARNING if executor.rank == 0 else logging.DEBUG
                log.log(level, "Pushed gradients are added up by torch's own kernels, which take longer: %s", error)
        self._staged = True

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


def _wanted(choice: str, device: torch.device, usable: bool) -> bool:
    # Before CUDA 13 each piece takes a call of the driver: more of the host's time than copies save on the device.
    one_call = device.type == "cuda" and (torch.version.cuda or "").split(".")[0] == "13"
    return choice == "copy" or (choice == "auto" and usable and one_call)


class PeerMemory:
    """Allocates such memory for the ranks of a process group; see :meth:`of`.

    Args:
        group: process group of the device.
        control_group: of the same ranks, on the CPU.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, control_group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._control_group = control_group
        self._device = device
        self._owners: list[Any] = []  # what keeps peers' memory mapped
        self.nbytes = 0  # of this rank's

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, control_group: dist.ProcessGroup, device: torch.device
    ) -> tuple[PeerMemory | None, str]:
        """This memory if there can be any, or None and the reason. The same on every rank. Collective."""
        if group.size() == 1:
            return None, "there is one rank"
        memory = cls(group, control_group, device)
        reason = memory._first(_host())
        if reason is not None:
            return None, reason
        try:
            memory.empty(1, torch.uint8)
        except UnsupportedError as error:
            return None, str(error)
        return memory, ""

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """1-D memory of this rank, and that of all ranks in their order, this one's included. Collective.

        Raises:
            UnsupportedError: on every rank, when one has no such memory.
        """
        on_cpu = self._device.type == "cpu"
        allocate, share = (self._file, self._map) if on_cpu else (self._symmetric, self._rendezvous)
        # In two steps: no rank may wait for one that has failed.
        mine = self._all(lambda: allocate(numel, dtype), "allocated", os.unlink if on_cpu else None)
        result = self._all(lambda: share(mine, numel, dtype), "mapped")
        self.nbytes += numel * dtype.itemsize
        return result

    def _all(self, job: Any, what: str, undo: Any = None) -> Any:
        error, result = None, None
        try:
            result = job()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        errors: list[Any] = [None] * self.group.size()
        dist.all_gather_object(errors, error, group=self._control_group)
        for rank, text in enumerate(errors):
            if text is not None:
                if undo is not None and error is None:
                    undo(result)
                raise UnsupportedError(f"memory that all ranks can read cannot be {what} on rank {rank} ({text})")
        return result

    def _first(self, host: str) -> str | None:
        hosts: list[Any] = [None] * self.group.size()
        dist.all_gather_object(hosts, host, group=self._control_group)
        other = next((rank for rank, name in enumerate(hosts) if name != hosts[0]), None)
        return None if other is None else f"ranks 0 and {other} are on different hosts"

    # -- GPUs

    def _symmetric(self, numel: int, dtype: torch.dtype) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        return symmetric.empty(numel, dtype=dtype, device=self._device)

    def _rendezvous(self, mine: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(mine, self.group.group_name)
        self._owners.append((handle, mine))
        return mine, [handle.get_buffer(rank, (numel,), dtype) for rank in range(self.group.size())]

    # -- CPUs

    def _file(self, numel: int, dtype: torch.dtype) -> str:
        descriptor, path = tempfile.mkstemp(prefix="lightning_zero_", dir=SHARED_MEMORY)
        try:
            # Claimed now: memory that runs out when it is first written ends the process without a word.
            os.posix_fallocate(descriptor, 0, max(numel * dtype.itemsize, 1))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def _map(self, path: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        paths: list[Any] = [None] * self.group.size()
        dist.all_gather_object(paths, path, group=self._control_group)
        try:
            tensors = [_mapped(other, numel, dtype) for other in paths]
        finally:
            dist.barrier(group=self._control_group)
            os.unlink(path)  # it lives on while it is mapped, and not a moment longer
        return tensors[self.group.rank()], tensors


def _mapped(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=dtype, count=numel)  # holds the mapping


def _host() -> str:
    # Containers of one image may share a name, and hosts of one cloud a boot.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
