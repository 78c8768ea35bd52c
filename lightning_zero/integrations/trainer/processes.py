"""The part of the Trainer's strategy that starts processes, and passes values between them."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_zero.integrations.launchers import TrainerLauncher, check_interactive
from lightning_zero.integrations.processes import ProcessGroupMixin, reduce_in_place

__all__ = ["ProcessStrategy"]


class ProcessStrategy(ProcessGroupMixin, ParallelStrategy):
    """One process for each device, in one process group.

    Args:
        process_group_backend: by default ``"nccl"`` on CUDA and ``"gloo"`` on the CPU.
        timeout: how long ranks wait for each other.
        report_stall_after_s: after how long a rank that waits for others to join says for which.
    """

    api_name = "Trainer"

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
        self._init_processes(process_group_backend, timeout, report_stall_after_s)

    @property
    def is_distributed(self) -> bool:
        """Without it the Trainer installs no distributed sampler."""
        return True

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_interactive(self.cluster_environment, self.num_processes * self.num_nodes, self.api_name)
        # Always: when processes are started from outside, the launcher is what compares `devices` with their number.
        self._launcher = TrainerLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._watch_collective("the reduction of a logged value") if group is None else nullcontext():
            return reduce_in_place(tensor, group, reduce_op)
