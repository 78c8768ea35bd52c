"""Gradients that ranks copy into each other's memory instead of reduce-scattering them."""

from __future__ import annotations

import logging
import math

import torch

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.symm_mem.memory import SymmetricMemory
from lightning_zero.sharding.symm_mem.transport_choice import TransportChoice, wanted

__all__ = ["GradientTransport"]

log = logging.getLogger(__name__)


class GradientTransport(TransportChoice):
    """Of gradients."""

    what, option = "gradients", "reduce_transport"

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._staged = False

    def copies(self, config: EngineConfig) -> bool:
        return wanted(config.tuning.reduce_transport, self.mesh.device, usable=True, on_cpu=False)

    def stage(self, executor: Executor, bucket_mb: float) -> None:
        """Memory of two buckets of ``bucket_mb`` MiB, that peers write to. Harmless when repeated. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough and gradients must be copied.
        """
        memory = self.memory
        if memory is None or self._staged:
            return
        self._staged = self.attempt(lambda: self._stage(executor, memory, bucket_mb))
        if not self._staged:
            self.memory = None

    def _stage(self, executor: Executor, memory: SymmetricMemory, bucket_mb: float) -> None:
        unit = executor.transport.staging_unit
        size = max(1, math.ceil(2 * bucket_mb * 2**20 / unit)) * unit
        mine, others = memory.empty(size, torch.uint8)
        staging = [mine if rank == self.mesh.intra_host.rank else other for rank, other in enumerate(others)]
        executor.transport.set_staging(staging, self.mesh.intra_host.gather_group, self.mesh.timeout_s)
        if executor.device.type == "cuda":
            try:
                executor.transport.compile_means()
            except RuntimeError as error:
                level = logging.WARNING if executor.rank == 0 else logging.DEBUG
                log.log(
                    level, "Gradients of all ranks are added up by torch's own kernels, which take longer: %s", error
                )
