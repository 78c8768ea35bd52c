"""What ranks move weights and gradients by, beyond collectives: memory that they can reach, and kernels."""

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
    """Of one executor; see ``csrc/transport/transport.h``.

    Args:
        native: the C++ object.
        mesh: of the ranks; those of a host move between their memories.
    """

    def __init__(self, native: Any, mesh: Mesh) -> None:
        self._native = native
        self._device, self._ranks = mesh.device, mesh.intra_host.size
        self._several_hosts = mesh.inter_host is not None
        self._limit: float | None = None

    @property
    def staging_unit(self) -> int:
        """Bytes of which staging memory must be a multiple."""
        return self._native.staging_unit()

    def set_staging(self, staging: list[Tensor], group: dist.ProcessGroup, timeout_s: float = 1800.0) -> None:
        """Memory of each rank that this one can write, as bytes: gradients are sent there instead of being
        reduce-scattered. Of one size, a multiple of :attr:`staging_unit`; on an accelerator, symmetric memory of
        ``group``. Legal outside backward; on every rank. A rank that waits longer than ``timeout_s`` for another ends
        with a device error."""
        self._native.set_staging(staging, group.group_name, int(1000 * timeout_s))

    def set_barrier(self, rows: list[Tensor]) -> None:
        """Barriers on devices are a kernel of our own from now on, whose waits the host can end.

        On every rank, before :meth:`set_staging`. ``rows``: of each rank, memory that all ranks can write,
        ``2 * ranks`` int32 zeros.

        Raises:
            RuntimeError: the kernel cannot be compiled or loaded here.
        """
        code = self._kernels("signal_kernels.cu", RANKS=self._ranks)
        words = torch.zeros(16, dtype=torch.int32, pin_memory=True)  # see csrc/sync/signal_pads.h
        self._native.set_barrier(code, rows, words)

    def compile_means(self) -> None:
        """Makes the kernel that adds up what ranks have sent on an NVIDIA device, in half the time of torch's.

        Raises:
            RuntimeError: it cannot be compiled or loaded here.
        """
        self._native.set_mean_kernels(self._kernels("kernels.cu", ROWS=self._ranks))

    def limit_cross_host_bandwidth(self, gbs: float | None) -> None:
        """Debugging: what crosses hosts, if there are several, arrives no sooner than at so many GB/s for each rank;
        None: when it does.

        Raises:
            RuntimeError: the kernel that waits on a device cannot be compiled or loaded here.
        """
        if gbs == self._limit:
            return
        on_device = gbs is not None and self._several_hosts and self._device.type == "cuda"
        code = self._kernels("kernels.cu") if on_device else None
        self._native.limit_cross_host_bandwidth(code, 1e9 * (gbs or 0.0))
        self._limit = gbs

    def mean_rows(self, to: Tensor, rows: Tensor, add: bool = False) -> bool:
        """Writes, or adds, the mean over dimension 0 of ``rows`` to ``to`` (1-D, contiguous, float32); returns whether
        there is a kernel for these. For the kernel's own tests."""
        return self._native.mean_rows(to, rows, add)

    def set_epoch_lock(self, numbers: list[Tensor]) -> None:
        """Shards will lie in memory that all ranks can read (``parameters.set_peer_shards``); ranks take turns to read and
        to write them. ``numbers``: of each rank, zeros in memory that all ranks can write, one int64, or on an
        accelerator ``ranks`` int32. On every rank; there, after :meth:`set_barrier`.

        Raises:
            RuntimeError: the kernels of an accelerator cannot be compiled or loaded here.
        """
        if self._device.type == "cpu":
            self._native.set_epoch_lock(numbers)
        else:
            self._native.set_device_epoch_lock(self._kernels("signal_kernels.cu", RANKS=self._ranks), numbers)

    def set_remote_signals(self, numbers: list[Tensor]) -> None:
        """Ranks of this host tell each other which parts of what hosts exchange have come to them. ``numbers``: of each
        rank, zeros in memory that all can write, one int64, or on an accelerator ``ranks`` int32; there, one int32 of
        this rank alone where no other reads its memory. With several hosts; not inside a graph.

        Raises:
            RuntimeError: the kernels of an accelerator cannot be compiled or loaded here.
        """
        if self._device.type == "cpu":
            self._native.set_remote_signals(numbers)
        else:
            self._native.set_device_remote_signals(self._kernels("signal_kernels.cu", RANKS=len(numbers)), numbers)

    def _kernels(self, source: str, **macros: int) -> Tensor:
        capability = torch.cuda.get_device_capability(self._device)
        return compile_cuda(kernel_source(source), capability, [f"-D{n}={value}" for n, value in macros.items()])
