"""What passes go by when they place transfers: seconds for a gather, and seconds for each node of a graph.

Measured once, when an engine is set up, by all ranks together, and the same on every rank. Compiling measures nothing
and asks nobody. The numbers decide *when* a transfer starts, never which weights travel together or are kept: that must
be the same in a graph that comes out of a cache which an earlier run filled, with numbers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.distributed as dist
from torch.fx import Graph

from lightning_zero.compat.distributed import all_gather_into
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.extrema import all_max
from lightning_zero.mesh import Mesh
from lightning_zero.profiling.cost import DeviceSpeed, graph_costs

__all__ = ["NOMINAL_COSTS", "CostModel", "measure_costs"]

# The one safety factor: the share of the measured bandwidth that transfers are expected to reach. They are measured
# alone, and beside compute they reach less (180 of 305 GB/s on four H200); and compute may be faster than estimated.
BESIDE_COMPUTE = 0.5
COPIED_BESIDE_COMPUTE = 0.8  # copy engines compete for memory only

SIZES = (1 << 18, 1 << 20, 1 << 23, 1 << 25, 1 << 27)
REPETITIONS = 4

Samples = tuple[tuple[int, float], ...]  # measured (bytes, seconds), by growing bytes


def _check_samples(name: str, samples: Samples) -> None:
    """Raise :class:`ValueError` unless samples are positive and their bytes grow."""
    sizes = [size for size, _ in samples]
    if not samples or sizes != sorted(set(sizes)) or min(sizes) <= 0 or min(s for _, s in samples) <= 0:
        raise ValueError(f"{name}={samples!r}: pass (bytes, seconds), all positive, by growing bytes.")


def _seconds_between(samples: Samples, nbytes: int) -> float:
    """Interpolate between two samples, in logarithms. A smaller transfer takes as long as the smallest, a larger one
    runs at the bandwidth of the largest."""
    if nbytes <= samples[0][0]:
        return samples[0][1] if nbytes > 0 else 0.0
    if nbytes >= samples[-1][0]:
        return samples[-1][1] * nbytes / samples[-1][0]
    (size, seconds), (larger, more) = next(
        pair for pair in zip(samples, samples[1:], strict=False) if pair[0][0] <= nbytes <= pair[1][0]
    )
    way = math.log(nbytes / size) / math.log(larger / size)
    return seconds * (more / seconds) ** way


@dataclass(frozen=True)
class CostModel:
    """Estimates of a device and of the links between ranks.

    Attributes:
        gathers: (bytes of the whole result, seconds) of all-gathers with nothing beside them, by growing bytes.
        speed: of the device.
        beside: the share of the bandwidth that is left beside compute.
        host_bytes_per_s: of copies to the host's memory and back, each, beside compute.

    Raises:
        ValueError: the samples are not positive and growing.
    """

    gathers: Samples
    speed: DeviceSpeed
    beside: float = BESIDE_COMPUTE
    host_bytes_per_s: float = HOST_BYTES_PER_S

    def __post_init__(self) -> None:
        _check_samples("gathers", self.gathers)

    @property
    def are_nominal(self) -> bool:
        """Whether neither the device nor the links between ranks were measured."""
        return replace(self, host_bytes_per_s=NOMINAL_COSTS.host_bytes_per_s) == NOMINAL_COSTS

    def gather_seconds(self, nbytes: int) -> float:
        """For an all-gather whose result has so many bytes, beside compute."""
        return _seconds_between(self.gathers, nbytes) / self.beside

    def node_seconds(self, graph: Graph) -> list[float]:
        """For each node, in the graph's order, on the compute stream."""
        return [cost.seconds for cost in graph_costs(graph, self.speed)]


# Where nothing is measured, on a CPU or with one rank: about what H200 with NVLink do, 22 us and 314 GB/s.
NOMINAL_COSTS = CostModel(
    gathers=((1 << 20, 25e-6), (1 << 22, 35e-6), (1 << 24, 75e-6), (1 << 26, 236e-6), (1 << 28, 877e-6)),
    speed=DeviceSpeed(
        {torch.bfloat16: 6e14, torch.float16: 6e14, torch.float32: 5e13}, bytes_per_s=4e12, launch_s=3e-6
    ),
)


def measure_costs(mesh: Mesh, copied: bool = False) -> CostModel:
    """Measures in under a second, not counting the time in which the group connects. Collective.

    Args:
        mesh: whose all-gathers are measured, of the ranks that hold the model together; all its ranks agree on the
            slowest one's numbers.
        copied: weights will be copied from peers, which takes about as long as an all-gather alone.

    Returns:
        The same on every rank; :data:`NOMINAL_COSTS` on a CPU, and with one rank.
    """
    shard_group = mesh.shard_group
    if mesh.device.type == "cpu" or shard_group.size == 1:
        return NOMINAL_COSTS
    gathers = _gathers(shard_group.gather_group, mesh.device, SIZES)
    costs = _agreed(gathers, DeviceSpeed.of(mesh.device), mesh.control_group)
    torch.accelerator.empty_cache()  # what was gathered would stay with the allocator
    return replace(costs, beside=COPIED_BESIDE_COMPUTE) if copied else costs


def _gathers(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> Samples:
    """The fastest of some all-gathers of each size. Every rank makes the same calls, whatever it measures."""
    gather = all_gather_into()
    whole = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    samples = []
    for number, size in enumerate(sizes):
        share = size // group.size()
        mine = torch.zeros(share, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(REPETITIONS + (number == 0)):  # the very first one sets up connections
            _finish(device)
            begun = perf_counter()
            gather(whole[: share * group.size()], mine, group=group)
            _finish(device)
            seconds.append(perf_counter() - begun)
        samples.append((share * group.size(), max(min(seconds), 1e-9)))
    return tuple(samples)


def _agreed(gathers: Samples, speed: DeviceSpeed, group: dist.ProcessGroup) -> CostModel:
    """The slowest rank's numbers, on every rank."""
    dtypes = list(speed.flops_per_s)
    mine = [seconds for _, seconds in gathers] + [1 / speed.flops_per_s[dtype] for dtype in dtypes]
    slowest = torch.tensor([*mine, 1 / speed.bytes_per_s, speed.launch_s], dtype=torch.float64)
    *rest, per_byte, launch_s = all_max(slowest, group).tolist()
    seconds, per_flop = rest[: len(gathers)], rest[len(gathers) :]
    return CostModel(
        tuple((size, took) for (size, _), took in zip(gathers, seconds, strict=True)),
        DeviceSpeed({d: 1 / value for d, value in zip(dtypes, per_flop, strict=True)}, 1 / per_byte, launch_s),
    )


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
