"""Transfers of weights and gradients through peer memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native.build import kernel_source
from lightning_zero.native.nvrtc import compile_cuda

__all__ = ["Transport"]


class Transport:
    """Peer memory and kernels of one executor, see ``csrc/transport/transports.h``.

    Args:
        native: The C++ object.
        mesh: Mesh of the ranks; those of one host copy between their memories.
    """

    def __init__(self, native: Any, mesh: Mesh) -> None:
        self._native = native
        self._device, self._ranks = mesh.device, mesh.intra_host.size
        self._several_hosts = mesh.inter_host is not None
        self._limit: float | None = None

    @property
    def staging_unit(self) -> int:
        """Bytes of which the size of staging memory must be a multiple."""
        return self._native.staging_unit()

    def set_staging(self, staging: list[Tensor], group: dist.ProcessGroup, timeout_s: float = 1800.0) -> None:
        """Send gradients through staging memory of each rank instead of a reduce-scatter. Call on every rank.

        Args:
            staging: Memory of each rank, as bytes, that this rank can write. Equal sizes, multiples of
                :attr:`staging_unit`; on an accelerator, symmetric memory of ``group``.
            group: Process group of the memory.
            timeout_s: A rank that waits longer for another one ends with a device error.
        """
        self._native.set_staging(staging, group.group_name, int(1000 * timeout_s))

    def set_barrier(self, rows: list[Tensor]) -> None:
        """Use our own kernel for device barriers; the host can end its waits.

        Call on every rank before :meth:`set_staging`.

        Args:
            rows: For each rank, memory that all ranks can write: ``2 * ranks`` int32 zeros.

        Raises:
            RuntimeError: The kernel cannot be compiled or loaded.
        """
        code = self._kernels("barrier.cu", RANKS=self._ranks, LANES=2)
        words = torch.zeros(16, dtype=torch.int32, pin_memory=True)  # see device_words.h
        self._native.set_barrier(code, rows, words)

    def compile_means(self) -> None:
        """Compile the kernel that averages received gradients on NVIDIA devices, in half the time of torch's.

        Raises:
            RuntimeError: The kernel cannot be compiled or loaded.
        """
        self._native.use_means(self._kernels("row_means.cu", ROWS=self._ranks))

    def limit_across(self, gbs: float | None) -> None:
        """Limit the bandwidth across hosts to ``gbs`` GB/s per rank, for debugging; None removes the limit.

        Raises:
            RuntimeError: The kernel that waits on the device cannot be compiled or loaded.
        """
        if gbs == self._limit:
            return
        on_device = gbs is not None and self._several_hosts and self._device.type == "cuda"
        code = self._kernels("slow_link.cu") if on_device else None
        self._native.limit_across(code, 1e9 * (gbs or 0.0))
        self._limit = gbs

    def mean_rows(self, to: Tensor, rows: Tensor, add: bool = False) -> bool:
        """Write or add the mean of ``rows`` over dimension 0 to ``to``; for the kernel's tests.

        ``to`` is 1-D, contiguous and float32.

        Return True if there is a kernel for these tensors.
        """
        return self._native.mean_rows(to, rows, add)

    def take_turns(self, numbers: list[Tensor]) -> None:
        """Make ranks take turns to read and write shards in shared memory (``parameters.set_shards``).

        Call on every rank.

        On an accelerator, call it after :meth:`set_barrier`.

        Args:
            numbers: For each rank, zeros in memory that all ranks can write: one int64, or ``ranks`` int32 on an
                accelerator.

        Raises:
            RuntimeError: The kernels cannot be compiled or loaded.
        """
        if self._device.type == "cpu":
            self._native.take_turns(numbers)
        else:
            self._native.take_device_turns(self._kernels("turns.cu", RANKS=self._ranks), numbers)

    def take_arrivals(self, numbers: list[Tensor]) -> None:
        """Let ranks of this host signal which parts of inter-host exchanges have arrived.

        With several hosts; not in a graph.

        Args:
            numbers: For each rank, zeros in memory that all ranks can write: one int64, or ``ranks`` int32 on an
                accelerator. On an accelerator whose memory no other rank reads: one int32 of this rank.

        Raises:
            RuntimeError: The kernels cannot be compiled or loaded.
        """
        if self._device.type == "cpu":
            self._native.take_arrivals(numbers)
        else:
            self._native.take_device_arrivals(self._kernels("arrivals.cu", RANKS=len(numbers)), numbers)

    def _kernels(self, source: str, **macros: int) -> Tensor:
        capability = torch.cuda.get_device_capability(self._device)
        return compile_cuda(kernel_source(source), capability, [f"-D{n}={value}" for n, value in macros.items()])
