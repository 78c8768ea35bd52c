"""Memory of the host that a device copies from and to while both go on: pinned, and near the device.

Torch's own pinned allocator rounds sizes up to powers of two, which for many GiB is memory that nobody has. This maps
what is asked for, lets threads on the CPUs next to the GPU touch it first, so that it lies in their part of the host's
memory, and registers it with the driver. For a CPU, memory of the host is what there is already.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.config.text import format_gib
from lightning_zero.errors import HostMemoryError
from lightning_zero.offload.numa import cpus_near

__all__ = ["HostMemory", "free_bytes"]

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
MAPPED = 2  # cudaHostRegisterMapped
TOUCHED_BYTES = 256 << 20  # by a thread at a time
MOST_THREADS = 8
INSTEAD = "Leave out offload=, give each process more memory of its host, or shard over more hosts."


class HostMemory:
    """For one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, not filled with anything in particular. It is given back with the last view of it.

        Raises:
            HostMemoryError: the host has not so much, or it cannot be pinned.
        """
        nbytes = numel * dtype.itemsize
        if self._device.type != "cuda" or not nbytes:
            return torch.empty(numel, dtype=dtype)
        return torch.frombuffer(self._pinned(nbytes), dtype=dtype, count=numel)  # holds the mapping

    def mapped(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same memory twice, 1-D zeros: as a tensor of the device, whose kernels read and write it over the link,
        and as one of the host, which copy engines do. Each knows nothing of the other's version. On a CPU both are one.

        Raises:
            HostMemoryError: likewise.
        """
        nbytes = numel * dtype.itemsize
        if self._device.type != "cuda" or not nbytes:
            both = torch.zeros(numel, dtype=dtype)
            return both.to(self._device), both
        memory = self._pinned(nbytes, MAPPED)
        with torch.cuda.device(self._device):
            seen = torch.as_tensor(_Seen(memory, nbytes), device=self._device)
        assert seen.data_ptr() == memory.address, "the device has made a copy"
        return seen.view(dtype), torch.frombuffer(memory, dtype=dtype, count=numel)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies where :meth:`empty` allocates."""
        return tensor.device.type == "cpu" and (self._device.type != "cuda" or tensor.is_pinned())

    def _pinned(self, nbytes: int, flags: int = 0) -> _Pinned:
        left = free_bytes()
        if left is not None and nbytes > left:
            raise HostMemoryError(
                f"{_both(nbytes)} of what is offloaded from {self._device} are to lie in the host's memory, which has "
                f"{_both(left)} left for this process. {INSTEAD}"
            )
        return _Pinned.of(nbytes, self._device, flags)

    def settle(self) -> None:
        """The host waits until all copies are there: it may read now."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Pinned(mmap.mmap):
    """Pages that stay where they are. The device's copies must be over when it goes, so it waits for them."""

    device: torch.device | None = None  # once it is pinned
    address = 0

    @classmethod
    def of(cls, nbytes: int, device: torch.device, flags: int = 0) -> _Pinned:
        try:
            memory = cls(-1, nbytes)
        except OSError as error:
            raise HostMemoryError(
                f"The host gave no memory for {_both(nbytes)} that are to be offloaded from {device} ({error}). "
                f"{INSTEAD}"
            ) from error
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _touch(memory.address, nbytes, cpus_near(device))
        try:
            with torch.cuda.device(device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.address, nbytes, flags))
        except RuntimeError as error:
            raise HostMemoryError(
                f"{_both(nbytes)} of the host's memory could not be pinned for copies from and to {device} ({error}). "
                "Containers and cgroups may limit pinned memory: raise that limit (ulimit -l, --ulimit memlock=-1). "
                f"{INSTEAD}"
            ) from error
        memory.device = device
        return memory

    def __del__(self) -> None:
        if self.device is not None and not sys.is_finalizing():
            with suppress(RuntimeError), torch.cuda.device(self.device):
                torch.cuda.synchronize()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.address))


class _Seen:
    """Such memory, as a device sees it: bytes, for ``torch.as_tensor``, which holds this object."""

    def __init__(self, memory: _Pinned, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _touch(address: int, nbytes: int, cpus: frozenset[int]) -> None:
    """Writes zeros, on these CPUs: pages are made where they are written first. On any, where none is given."""

    def bind() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread

    begins = range(0, nbytes, TOUCHED_BYTES)
    threads = min(MOST_THREADS, len(begins), len(cpus or os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "first touch", bind) as pool:
        list(pool.map(lambda begin: ctypes.memset(address + begin, 0, min(TOUCHED_BYTES, nbytes - begin)), begins))


def free_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """What the host, and the container where it has a limit, can still give; None where nobody says."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        found.append(next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"))
    with suppress(OSError, ValueError):
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(words[1]) for words in lines if words[0] == "inactive_file")
        found.append(max(limit - used + cached, 0))
    return min(found, default=None)


def _both(nbytes: int) -> str:
    return f"{format_gib(nbytes)} GiB ({nbytes:,} bytes)"
