"""Seconds that an all-gather or a reduce-scatter of so many bytes takes in one process group.

A table is measured once, by all ranks together, and is the same on every rank: decisions that are taken with it must
be. Bytes are always those of the whole tensor, the gathered one or the one before it is reduced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist

from lightning_zero.compat.distributed import all_gather_into
from lightning_zero.extrema import all_max

__all__ = ["BandwidthTable", "measure"]

Samples = tuple[tuple[int, float], ...]

CPU_SIZES = (1 << 12, 1 << 16, 1 << 20)
GPU_SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28)


@dataclass(frozen=True)
class BandwidthTable:
    """Measured (bytes, seconds), by growing bytes.

    Attributes:
        world_size: of the group that was measured.
        gather: all-gathers.
        reduce: reduce-scatters.
    """

    world_size: int
    gather: Samples
    reduce: Samples

    def __post_init__(self) -> None:
        for kind, samples in (("gather", self.gather), ("reduce", self.reduce)):
            check_samples(kind, samples)

    def gather_seconds(self, nbytes: int) -> float:
        """For an all-gather whose result has so many bytes."""
        return seconds_between(self.gather, nbytes)

    def reduce_seconds(self, nbytes: int) -> float:
        """For a reduce-scatter whose input has so many bytes on each rank."""
        return seconds_between(self.reduce, nbytes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BandwidthTable:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: the text is no table.
        """
        try:
            data = json.loads(text)
            gather, reduce = (tuple((int(n), float(s)) for n, s in data[kind]) for kind in ("gather", "reduce"))
            return cls(int(data["world_size"]), gather, reduce)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is no bandwidth table: {error}.") from error


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    repetitions: int = 3,
    budget_s: float = 0.3,
) -> BandwidthTable:
    """Measures a table. Collective: call it on every rank of the group, with the same arguments.

    Args:
        sizes: bytes to measure, growing; rounded up to what the ranks can share equally.
        repetitions: of each transfer; the fastest counts, and of all ranks the slowest.
        budget_s: once so many seconds are spent, larger sizes are left out.
    """
    all_gather = all_gather_into()
    # Renamed like the other, see all_gather_into().
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    world_size = group.size()
    measured: list[tuple[int, float, float]] = []
    spent = 0.0
    for size in sizes or (CPU_SIZES if device.type == "cpu" else GPU_SIZES):
        share = -(-size // (4 * world_size))
        whole = torch.zeros(share * world_size, device=device)
        mine = torch.zeros(share, device=device)
        begun = perf_counter()
        gather = _fastest(partial(all_gather, whole, mine, group=group), device, repetitions)
        reduce = _fastest(partial(reduce_scatter, mine, whole, group=group), device, repetitions)
        # The ranks agree on the time spent too: all must stop at the same size.
        agreed = torch.tensor([gather, reduce, perf_counter() - begun], dtype=torch.float64, device=device)
        gather, reduce, took = all_max(agreed, group).tolist()
        measured.append((whole.nbytes, gather, reduce))
        spent += took
        if spent > budget_s:
            break
    return BandwidthTable(
        world_size,
        tuple((size, gather) for size, gather, _ in measured),
        tuple((size, reduce) for size, _, reduce in measured),
    )


def _fastest(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions + 1):
        begun = perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(perf_counter() - begun)
    return max(min(seconds[1:]), 1e-9)  # the first one sets up connections


def check_samples(name: str, samples: Samples) -> None:
    """Raises :class:`ValueError` unless samples are positive and their bytes grow."""
    sizes = [size for size, _ in samples]
    if not samples or sizes != sorted(set(sizes)) or min(sizes) <= 0 or min(s for _, s in samples) <= 0:
        raise ValueError(f"{name}={samples!r}: pass (bytes, seconds), all positive, by growing bytes.")


def seconds_between(samples: Samples, nbytes: int) -> float:
    """On the straight line between two samples, in logarithms. A smaller transfer takes as long as the smallest, a
    larger one runs at the bandwidth of the largest."""
    if nbytes <= samples[0][0]:
        return samples[0][1] if nbytes > 0 else 0.0
    if nbytes >= samples[-1][0]:
        return samples[-1][1] * nbytes / samples[-1][0]
    (size, seconds), (larger, more) = next(
        pair for pair in zip(samples, samples[1:], strict=False) if pair[0][0] <= nbytes <= pair[1][0]
    )
    way = math.log(nbytes / size) / math.log(larger / size)
    return seconds * (more / seconds) ** way
