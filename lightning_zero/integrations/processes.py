"""The part of a strategy, Lightning's or Fabric's, that lets processes find each other and passes values on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_zero.compat.lightning_private import init_process_group, reduce_value
from lightning_zero.extrema import all_max, all_min
from lightning_zero.integrations.process_group import check_backend, check_rank, check_world_size
from lightning_zero.native.startup import StartupWatch

__all__ = ["ProcessGroupMixin", "without_nccl_abort", "reduce_in_place"]

T = TypeVar("T")

_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"


@contextmanager
def without_nccl_abort() -> Iterator[None]:
    """Process groups that are made inside do not abort the process after an error on the device: NCCL's own watchdog
    would do so before the traceback is there. What else that one finds, ours looks at (:class:`Watchdog`)."""
    if _RETHROW in os.environ:
        yield
        return
    os.environ[_RETHROW] = "0"
    try:
        yield
    finally:
        del os.environ[_RETHROW]


def reduce_in_place(tensor: Tensor, group: Any, reduce_op: ReduceOp | str | None) -> Tensor:
    """Reduce a value over ranks as Lightning's strategies do, but keep a NaN in maxima and minima. Collective."""
    ranks: Any = _group.WORLD if group is None else group
    if dist.is_initialized() and tensor.is_floating_point():
        if reduce_op in ("max", "MAX", dist.ReduceOp.MAX):
            return tensor.copy_(all_max(tensor, ranks))
        if reduce_op in ("min", "MIN", dist.ReduceOp.MIN):
            return tensor.copy_(all_min(tensor, ranks))
    return reduce_value(tensor, group, reduce_op=reduce_op)


class ProcessGroupMixin:
    """One process for each device, in one process group. For a strategy, which has ranks, devices and a cluster's
    environment from Lightning, and calls :meth:`_init_processes` when it is made."""

    api_name: str  # for messages: "Trainer" or "Fabric"
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    local_rank: Any
    node_rank: Any
    global_rank: Any
    world_size: Any

    def _init_processes(self, backend: str | None, timeout: timedelta | None, report_s: float) -> None:
        """
        backend: by default ``"nccl"`` on CUDA and ``"gloo"`` on the CPU
        timeout: how long ranks wait for each other
        report_s: after how long a rank that waits for others to join says for which
        """
        self._num_nodes = 1
        self._process_group_backend = backend
        self._timeout = timeout
        self._stall_report_s = report_s
        self._startup: StartupWatch | None = None

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def setup_environment(self) -> None:
        self.set_world_ranks()
        cluster = self.cluster_environment
        assert cluster is not None
        check_world_size(self.api_name, self.num_processes, self.num_nodes)
        check_rank(self.api_name, self.global_rank)
        check_backend(self.api_name, self._process_group_backend, self.root_device)
        if self.world_size > 1 and not torch.distributed.is_initialized():
            first = self.node_rank * self.num_processes
            neighbours = range(first, first + self.num_processes)
            self._startup = StartupWatch(
                cluster.main_address, cluster.main_port, self.global_rank, self.world_size, neighbours, self._stall_report_s
            )
        self.accelerator.setup_device(self.root_device)
        backend = self._process_group_backend or torch.distributed.get_default_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        init_process_group(cluster, backend, timeout=self._timeout, device_id=device)
        if self._startup is not None:
            self._startup.joined()

    def _close_startup(self) -> None:
        """Something else watches over the ranks."""
        if self._startup is not None:
            self._startup.close()
            self._startup = None

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    def barrier(self, name: str | None = None) -> None:
        if not torch.distributed.is_initialized() or self._barrier_is_redundant(name):
            return
        with self._watch_collective(f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's"):
            if torch.distributed.get_backend() == "nccl":
                torch.distributed.barrier(device_ids=[self.root_device.index])
            else:
                torch.distributed.barrier()

    def _barrier_is_redundant(self, barrier: str | None) -> bool:
        """Whether all ranks have just met anyway."""
        return False

    def _watch_collective(self, what: str) -> AbstractContextManager[None]:
        """Surrounds a collective of all ranks that is called ``what``."""
        return nullcontext()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, which the others unpickle: other ranks are trusted. Collective."""
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        with self._watch_collective("a broadcast of Lightning's"):
            torch.distributed.broadcast_object_list(objects, src, group=self._object_group())
        return objects[0]

    def _object_group(self) -> Any:
        """All ranks, for what lies on the host."""
        return _group.WORLD
