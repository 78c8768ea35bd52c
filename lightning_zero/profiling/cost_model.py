"""Cost model of graph passes: seconds of a gather, and of each node of a graph.

All ranks measure it together when an engine is set up, and have equal numbers. Invariant: the numbers decide when a
transfer starts, never which weights form a group or are kept. A graph from a cache was compiled with the numbers of an
earlier run and must have the same groups.
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
from lightning_zero.mesh import Mesh, all_max
from lightning_zero.profiling.node_costs import DeviceSpeed, graph_costs

# Share of the measured bandwidth that transfers reach concurrently with compute: 180 of 305 GB/s on four H200. This is
# the only safety factor; compute may also be faster than estimated.
BESIDE_COMPUTE = 0.5
COPIED_BESIDE_COMPUTE = 0.8  # copy engines compete for memory bandwidth only

SIZES = (1 << 18, 1 << 20, 1 << 23, 1 << 25, 1 << 27)
REPETITIONS = 4

Samples = tuple[tuple[int, float], ...]  # measured (bytes, seconds), by growing bytes


def _check_samples(name: str, samples: Samples) -> None:
    """Raise :class:`ValueError` unless samples are positive and their bytes grow."""
    sizes = [size for size, _ in samples]
    if not samples or sizes != sorted(set(sizes)) or min(sizes) <= 0 or min(s for _, s in samples) <= 0:
        raise ValueError(f"{name}={samples!r}: pass (bytes, seconds), all positive, by growing bytes.")


def _seconds_between(samples: Samples, nbytes: int) -> float:
    """Interpolate logarithmically between two samples.

    A smaller transfer takes as long as the smallest, a larger one runs at the bandwidth of the largest.
    """
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
    """Cost model of a device and of the links between ranks.

    Attributes:
        gathers: (bytes of the result, seconds) of all-gathers without concurrent compute, by growing bytes.
        speed: of the device.
        beside: share of the bandwidth that remains during compute.
        host_bytes_per_s: bandwidth of D2H and H2D copies, each, during compute.

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
        """Return True if neither the device nor the links between ranks were measured."""
        return replace(self, host_bytes_per_s=NOMINAL_COSTS.host_bytes_per_s) == NOMINAL_COSTS

    def gather_seconds(self, nbytes: int) -> float:
        """Return the seconds of an all-gather with a result of ``nbytes``, during compute."""
        return _seconds_between(self.gathers, nbytes) / self.beside

    def node_seconds(self, graph: Graph) -> list[float]:
        """Return the seconds of each node on the compute stream, in the graph's order."""
        return [cost.seconds for cost in graph_costs(graph, self.speed)]


# For a CPU or one rank, where nothing is measured: close to H200s with NVLink (22 us and 314 GB/s).
NOMINAL_COSTS = CostModel(
    gathers=((1 << 20, 25e-6), (1 << 22, 35e-6), (1 << 24, 75e-6), (1 << 26, 236e-6), (1 << 28, 877e-6)),
    speed=DeviceSpeed(
        {torch.bfloat16: 6e14, torch.float16: 6e14, torch.float32: 5e13}, bytes_per_s=4e12, launch_s=3e-6
    ),
)


def measure_costs(mesh: Mesh, copied: bool = False) -> CostModel:
    """Measure the device and the all-gathers of a shard group in less than a second. Collective.

    Args:
        mesh: the ranks, which agree on the slowest one's numbers.
        copied: weights are copied from symmetric memory, which takes about as long as an all-gather.

    Returns:
        Equal numbers on every rank; :data:`NOMINAL_COSTS` on a CPU, and with one rank.
    """
    shard_group = mesh.shard_group
    if mesh.device.type == "cpu" or shard_group.size == 1:
        return NOMINAL_COSTS
    gathers = _gathers(shard_group.gather_group, mesh.device, SIZES)
    costs = _agreed(gathers, DeviceSpeed.of(mesh.device), mesh.control_group)
    torch.accelerator.empty_cache()  # the gathered buffers would stay in the allocator's cache
    return replace(costs, beside=COPIED_BESIDE_COMPUTE) if copied else costs


def _gathers(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> Samples:
    """Return the fastest of some all-gathers of each size. Every rank makes the same calls."""
    gather = all_gather_into()
    whole = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    samples = []
    for number, size in enumerate(sizes):
        share = size // group.size()
        mine = torch.zeros(share, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(REPETITIONS + (number == 0)):  # the first one connects
            _finish(device)
            begun = perf_counter()
            gather(whole[: share * group.size()], mine, group=group)
            _finish(device)
            seconds.append(perf_counter() - begun)
        samples.append((share * group.size(), max(min(seconds), 1e-9)))
    return tuple(samples)


def _agreed(gathers: Samples, speed: DeviceSpeed, group: dist.ProcessGroup) -> CostModel:
    """Return the slowest rank's numbers on every rank."""
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
