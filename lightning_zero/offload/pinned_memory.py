"""Allocate pinned host memory near a device, and decide which master weights are stored there.

torch's allocator of pinned memory rounds up to powers of two, which wastes many GiB. Here memory is mapped with its
exact size, first touched by threads on the CPUs of the GPU's NUMA node, and registered with the driver. For a CPU
device it is ordinary memory.
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

from lightning_zero.config import EngineConfig
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import HostMemoryError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding.flat_memory import HostMasterPolicy

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
MAPPED = 2  # cudaHostRegisterMapped
TOUCH_BYTES = 256 << 20  # of one task of a thread
MOST_THREADS = 8
ADVICE = "Leave out offload=, give each process more memory of its host, or shard over more hosts."


class HostMemory:
    """Allocate host memory for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D tensor. Its memory is freed with its last view.

        Raises:
            HostMemoryError: the host has too little memory, or cannot pin it.
        """
        nbytes = numel * dtype.itemsize
        if self._device.type != "cuda" or not nbytes:
            return torch.empty(numel, dtype=dtype)
        return torch.frombuffer(self._pinned(nbytes), dtype=dtype, count=numel)  # keeps the mapping alive

    def mapped(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the same 1-D zeros twice, as a device tensor and as a CPU tensor.

        Kernels access the first one over the link; copy engines use the second. Each has its own version counter. On a
        CPU both are one tensor.
        """
        nbytes = numel * dtype.itemsize
        if self._device.type != "cuda" or not nbytes:
            both = torch.zeros(numel, dtype=dtype)
            return both.to(self._device), both
        memory = self._pinned(nbytes, MAPPED)
        with torch.cuda.device(self._device):
            seen = torch.as_tensor(_CudaView(memory, nbytes), device=self._device)
        assert seen.data_ptr() == memory.address, "the device has made a copy"
        return seen.view(dtype), torch.frombuffer(memory, dtype=dtype, count=numel)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor is in memory as :meth:`empty` allocates it."""
        return tensor.device.type == "cpu" and (self._device.type != "cuda" or tensor.is_pinned())

    def _pinned(self, nbytes: int, flags: int = 0) -> _Pinned:
        left = free_bytes()
        if left is not None and nbytes > left:
            raise HostMemoryError(
                f"{_gib_and_bytes(nbytes)} are to be offloaded from {self._device}, but host memory has only "
                f"{_gib_and_bytes(left)} available for this process. {ADVICE}"
            )
        return _Pinned.of(nbytes, self._device, flags)

    def settle(self) -> None:
        """Block the host until all copies have finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Pinned(mmap.mmap):
    """Hold mapped pages that are pinned. Before unpinning them, it waits for the device's copies."""

    device: torch.device | None = None  # set after pinning
    address = 0

    @classmethod
    def of(cls, nbytes: int, device: torch.device, flags: int = 0) -> _Pinned:
        try:
            memory = cls(-1, nbytes)
        except OSError as error:
            raise HostMemoryError(
                f"The host gave no memory for {_gib_and_bytes(nbytes)} to offload from {device} ({error}). {ADVICE}"
            ) from error
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _touch_pages(memory.address, nbytes, cpus_near(device))
        try:
            with torch.cuda.device(device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.address, nbytes, flags))
        except RuntimeError as error:
            raise HostMemoryError(
                f"{_gib_and_bytes(nbytes)} of host memory could not be pinned for copies with {device} ({error}). "
                "Containers and cgroups may limit pinned memory: raise that limit (ulimit -l, --ulimit memlock=-1). "
                f"{ADVICE}"
            ) from error
        memory.device = device
        return memory

    def __del__(self) -> None:
        if self.device is not None and not sys.is_finalizing():
            with suppress(RuntimeError), torch.cuda.device(self.device):
                torch.cuda.synchronize()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.address))


class _CudaView:
    """Expose pinned memory to ``torch.as_tensor`` as bytes of a device."""

    def __init__(self, memory: _Pinned, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _touch_pages(address: int, nbytes: int, cpus: frozenset[int]) -> None:
    """Write zeros by threads on these CPUs: pages are allocated on the node that writes first.

    If there are none, any CPU is used.
    """

    def bind() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # this thread only

    begins = range(0, nbytes, TOUCH_BYTES)
    threads = min(MOST_THREADS, len(begins), len(cpus or os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "first touch", bind) as pool:
        list(pool.map(lambda begin: ctypes.memset(address + begin, 0, min(TOUCH_BYTES, nbytes - begin)), begins))


def free_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that the host and the container's limit still allow; None if unknown."""
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


def _gib_and_bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


SYS = Path("/sys")


def cpus_near(device: torch.device, sys: Path = SYS) -> frozenset[int]:
    """Return the CPUs of the GPU's NUMA node that this process may use; empty if unknown."""
    place = _pci_address(device)
    if place is None:
        return frozenset()
    try:
        node = int((sys / "bus/pci/devices" / place / "numa_node").read_text())
        cpus = (sys / f"devices/system/node/node{node}/cpulist").read_text()  # numa_node is -1 without NUMA
    except (OSError, ValueError):
        return frozenset()
    return parse_cpu_list(cpus) & os.sched_getaffinity(0)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's lists of numbers: ``"0-2,8"`` is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _pci_address(device: torch.device) -> str | None:
    """Return the PCI address as sysfs writes it."""
    if device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(known, name) for name in names):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*(getattr(known, name) for name in names))


def host_master_policy(config: EngineConfig, mesh: Mesh) -> HostMasterPolicy | None:
    """Return the policy for ``offload=("optimizer", "parameters")``; None: no master shard is on the host."""
    check_host_masters(config, mesh.shard_host_count)
    if "parameters" not in config.offload or config.compute_dtype is None:
        return None
    return HostMasterPolicy(config.compute_dtype, HostMemory(mesh.device).mapped)


def check_host_masters(config: EngineConfig, hosts: int) -> None:
    """Raise :class:`UnsupportedError` if master shards should be on the host, but cannot.

    ``hosts`` is the number of hosts over which each parameter is sharded.
    """
    if "parameters" not in config.offload:
        return
    if config.compute_dtype is None:
        raise UnsupportedError(
            f"offload={config.offload!r}: with this precision there is nothing besides the weights that the model "
            "could compute with, so they stay on the device. Pass precision='bf16-mixed' or '16-mixed', or leave "
            "'parameters' out."
        )
    if hosts > 1:
        raise UnsupportedError(
            f"offload={config.offload!r}: over several hosts ({hosts} here) master weights stay on the "
            "device. Leave 'parameters' out; each GPU has fewer of them, the more there are. With "
            "tuning=Tuning(replicate_over='hosts') they may leave, as on one host."
        )
