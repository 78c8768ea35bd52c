"""The part of a strategy that starts processes, lets them find each other, and passes values between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_zero.compat.lightning_private import SubprocessScriptLauncher, init_process_group, reduce_value
from lightning_zero.native.startup import StartupWatch

__all__ = ["ProcessStrategy", "nccl_lets_errors_show"]

_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"


@contextmanager
def nccl_lets_errors_show() -> Iterator[None]:
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


class ProcessStrategy(ParallelStrategy):
    """One process for each device, in one process group.

    Args:
        process_group_backend: by default ``"nccl"`` on CUDA and ``"gloo"`` on the CPU.
        timeout: how long ranks wait for each other.
        report_stall_after_s: after how long a rank that waits for others to join says for which.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        report_stall_after_s: float = 30.0,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._report_s = report_stall_after_s
        self._startup: StartupWatch | None = None

    @property
    def is_distributed(self) -> bool:
        """Without it the Trainer installs no distributed sampler."""
        return True

    @property
    @override
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
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Always: when processes are started from outside, the launcher is what compares `devices` with their number.
        self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        cluster = self.cluster_environment
        assert cluster is not None
        if self.world_size > 1 and not torch.distributed.is_initialized():
            first = self.node_rank * self.num_processes
            neighbours = range(first, first + self.num_processes)
            self._startup = StartupWatch(
                cluster.main_address, cluster.main_port, self.global_rank, self.world_size, neighbours, self._report_s
            )
        super().setup_environment()
        reset_seed()
        backend = self._process_group_backend or torch.distributed.get_default_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        init_process_group(cluster, backend, timeout=self._timeout, device_id=device)
        if self._startup is not None:
            self._startup.joined()

    def _end_startup(self) -> None:
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

    @override
    def barrier(self, name: str | None = None) -> None:
        if not torch.distributed.is_initialized():
            return
        with self._waiting(f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's"):
            if torch.distributed.get_backend() == "nccl":
                torch.distributed.barrier(device_ids=[self.root_device.index])
            else:
                torch.distributed.barrier()

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        """Surrounds a collective of all ranks that is called ``what``."""
        return nullcontext()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        with self._waiting("a broadcast of Lightning's"):
            torch.distributed.broadcast_object_list(objects, src, group=_group.WORLD)
        return objects[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._waiting("the reduction of a logged value") if group is None else nullcontext():
            return reduce_value(tensor, group, reduce_op=reduce_op)
