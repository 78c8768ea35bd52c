"""How fast copies between a device and pinned memory of its host are, while both directions and all ranks copy: hosts
share it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_zero.errors import HostMemoryError
from lightning_zero.extrema import all_min
from lightning_zero.mesh import Mesh
from lightning_zero.offload.copy_streams import copy_streams_of
from lightning_zero.offload.memory import HostMemory

__all__ = ["FRACTION_WITH_COMPUTE", "measure_host_bandwidth"]

NBYTES = 64 << 20  # of a copy
REPETITIONS = 4
FRACTION_WITH_COMPUTE = 0.9  # the share that is expected there; copies take no part of the device but its memory's bandwidth


def measure_host_bandwidth(mesh: Mesh) -> float | None:
    """Bytes per second in each direction, on the slowest rank, in some hundredths of a second; None on a CPU, where
    there is nothing to measure, and where a host pins no memory: whoever offloads is told by name. Gives all memory
    back. Collective."""
    if mesh.device.type == "cpu":
        return None
    host = HostMemory(mesh.device)
    try:
        ends = host.empty(NBYTES, torch.uint8), host.empty(NBYTES, torch.uint8)
    except HostMemoryError:
        ends = None
    dist.barrier(group=mesh.control_group)
    slowest = torch.tensor(0.0 if ends is None else _bytes_per_s(*ends, mesh.device), dtype=torch.float64)
    return all_min(slowest, mesh.control_group).item() or None


def _bytes_per_s(there: torch.Tensor, back: torch.Tensor, device: torch.device) -> float:
    sent, came = (torch.empty(NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    lanes, best = copy_streams_of(device), 0.0
    for number in range(REPETITIONS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(torch.cuda.current_stream(device))
        both = [lanes.bring([(sent, there)], [begun]), lanes.take([(back, came)], [begun])]
        for copy in both:
            lanes.wait(copy)
        ended.record(torch.cuda.current_stream(device))
        ended.synchronize()
        if number:  # the first one wakes the device up
            best = max(best, NBYTES / (begun.elapsed_time(ended) * 1e-3))
    return best
