"""How fast copies between a device and pinned memory of its host are, while all ranks copy: hosts share it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.offload.memory import HostMemory

__all__ = ["measure_host"]

NBYTES = 64 << 20  # of a copy
REPETITIONS = 4
BESIDE_COMPUTE = 0.9  # the share that is expected there; copies take no part of the device but its memory's bandwidth


def measure_host(mesh: Mesh, nominal: float) -> float:
    """Bytes per second that a copy is expected to reach, in the slower direction, on the slowest rank; on a CPU,
    where there is nothing to measure, the ``nominal`` ones. Takes some milliseconds. Collective."""
    if mesh.device.type == "cpu":
        return nominal
    host = HostMemory(mesh.device).empty(NBYTES, torch.uint8)
    device = torch.empty(NBYTES, dtype=torch.uint8, device=mesh.device)
    seconds = [0.0, 0.0]
    for direction, (to, source) in enumerate(((host, device), (device, host))):
        dist.barrier(group=mesh.control_group)
        seconds[direction] = min(_seconds(to, source, mesh.device) for _ in range(REPETITIONS))
    slowest = torch.tensor(max(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.control_group)
    return BESIDE_COMPUTE * NBYTES / slowest.item()


def _seconds(to: Tensor, source: Tensor, device: torch.device) -> float:
    torch.accelerator.synchronize(device)
    begun = time.perf_counter()
    to.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    return max(time.perf_counter() - begun, 1e-9)
