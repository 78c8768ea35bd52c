"""Factors and shards of weights that compiled code gathers in fp8.

Each matrix has one factor: the largest absolute value in the master shards of all ranks, over the largest fp8 number.
:class:`Fp8Shards` computes all factors with one all-reduce, and divides this rank's shards by them. The executor gathers
the result, see ``csrc/weights/compute_shards.h``. Factors and shards keep their addresses, which CUDA graphs read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.flat_memory import ShardMemory, compute_dtype_of, stays_full_precision
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter
from lightning_zero.sharding.shard_tensor import without_shard_dispatch

DTYPE = torch.float8_e4m3fn
# Bounds a maximum from below, so that the factor of a matrix of zeros is not zero.
MIN_AMAX = 1e-12
SIZE_UNIT = 16  # of rows and columns of a matrix that ``torch._scaled_mm`` reads
# Elements between two fp8 shards that are cast with them, because a kernel launch takes longer. About a norm's.
MAX_GAP_NUMEL = 1 << 14


def uses_fp8_shards(config: EngineConfig, mesh: Mesh, peer_copies: bool) -> bool:
    """Return True if compiled code gathers weights in fp8. The result is the same on every rank.

    Args:
        peer_copies: ranks copy each other's weights.
    """
    return (
        config.tuning.fp8_shards
        and config.linear_dtype == "fp8"
        and config.compile
        and config.compute_dtype is not None
        and config.memory is None
        and not config.tuning.grad_aliasing
        and "parameters" not in config.offload
        and mesh.inter_host is None
        and not peer_copies
    )


@dataclass(frozen=True)
class _Run:
    """Neighboring shards that one kernel casts, as rows that do not cross shards.

    Attributes:
        masters, copies: views of shape (rows, columns), in float32 and in fp8.
        numbers: position of each row's factor, int64; one past the last for rows between fp8 shards.
    """

    masters: Tensor
    copies: Tensor
    numbers: Tensor


class Fp8Shards:
    """Factors and fp8 shards of one engine's weights.

    Args:
        memory: allocates the shards.

    Attributes:
        factors: float32, one for each matrix that may be gathered in fp8, equal on all ranks.
    """

    def __init__(self, executor: Executor, mesh: Mesh, records: Records, memory: ShardMemory) -> None:
        self._executor, self._mesh, self._all_records, self._memory = executor, mesh, records, memory
        self._records: list[ShardedParameter] = []
        self._runs: list[_Run] = []
        self.factors = torch.ones(0, device=mesh.device)

    def allocate(self, dtype: torch.dtype) -> bool:
        """Allocate shards for the dtypes in which weights were gathered so far; return True if any is new.

        Until then each gather casts the master shard.

        Args:
            dtype: compute dtype.
        """
        weights = self._executor.weights
        compute = [
            record
            for record in self._missing(weights.gathered_in(dtype), Role.COMPUTE_SHARD)
            if compute_dtype_of(record.param.dtype, dtype) != record.param.dtype
        ]
        fp8 = self._missing(weights.gathered_in(DTYPE), Role.FP8_SHARD)
        if compute:
            self._memory.allocate_some_compute_shards(compute, dtype)
        if fp8:
            self._allocate_fp8(fp8)
        return bool(compute or fp8)

    def _missing(self, indices: Sequence[int], role: Role) -> list[ShardedParameter]:
        records = [self._all_records[index] for index in indices]
        return [record for record in records if record.owners and role not in record.memory]

    @without_shard_dispatch
    @torch.no_grad()
    def refresh(self) -> None:
        """Compute all factors from the master shards, and write the fp8 shards. Collective."""
        self._find_matrices()
        if not self._records:
            return
        amax = torch.stack(list(foreach_norm([record.shard for record in self._records], math.inf)))
        # Process groups disagree about the maximum of NaN and a number.
        amax = amax.nan_to_num_(nan=math.inf, posinf=math.inf)
        if self._mesh.world_size > 1:
            self._executor.collective(
                "the largest values of weights",
                SequenceId.GATHER,
                lambda later: dist.all_reduce(
                    amax, dist.ReduceOp.MAX, group=self._mesh.shard_group.gather_group, async_op=later
                ),
            )
        torch.mul(amax.clamp_min_(MIN_AMAX), 1 / torch.finfo(DTYPE).max, out=self.factors)
        # No clamp: rounding exceeds the largest number by less than half of its last place.
        scales = torch.cat([self.factors.reciprocal(), self.factors.new_zeros(1)])
        for run in self._runs:
            torch.mul(run.masters, scales[run.numbers].unsqueeze(1), out=run.copies)
        self._executor.weights.mark_fp8_shards_written()

    def _find_matrices(self) -> None:
        """Find the matrices that may be gathered in fp8, and tell the executor where their factors are."""
        found = [record for record in self._all_records.live if _may_be_fp8(record)]
        if [record.index for record in found] == [record.index for record in self._records]:
            return
        self._records = found
        self.factors = torch.ones(len(found), device=self._mesh.device)
        for record, factor in zip(found, self.factors.unbind(), strict=True):
            self._executor.parameters.set_fp8_factor(record.index, factor)
        self._find_runs()

    def _allocate_fp8(self, new: Sequence[ShardedParameter]) -> None:
        """Allocate fp8 shards, those of neighbors contiguous, with gaps where few elements are between them."""
        for members in _neighbors(new):
            begin, end = _span(members)
            memory = torch.zeros(end - begin, dtype=DTYPE, device=self._mesh.device)
            for record in members:
                first, last = _span([record])
                record.memory[Role.FP8_SHARD] = memory[first - begin : last - begin]
                self._executor.parameters.set_fp8_shard(record.index, record.memory[Role.FP8_SHARD])
        self._find_runs()

    def _find_runs(self) -> None:
        numbers = {record.index: number for number, record in enumerate(self._records)}
        by_memory: dict[int, list[ShardedParameter]] = {}
        for record in self._records:
            if Role.FP8_SHARD in record.memory:
                address = record.memory[Role.FP8_SHARD].untyped_storage().data_ptr()
                by_memory.setdefault(address, []).append(record)
        self._runs = [self._run(members, numbers) for members in by_memory.values()]

    def _run(self, members: list[ShardedParameter], numbers: dict[int, int]) -> _Run:
        members = sorted(members, key=lambda record: record.shard.storage_offset())
        begin, end = _span(members)
        edges = [edge - begin for record in members for edge in _span([record])]
        columns = math.gcd(*edges)
        rows = torch.full(((end - begin) // columns,), len(numbers))
        for record in members:
            first, last = _span([record])
            rows[(first - begin) // columns : (last - begin) // columns] = numbers[record.index]
        whole = members[0].shard.as_strided((end - begin,), (1,), begin)
        copies = members[0].memory[Role.FP8_SHARD]
        return _Run(
            whole.view(-1, columns),
            copies.as_strided((end - begin,), (1,), 0).view(-1, columns),
            rows.to(self._mesh.device),
        )


def _may_be_fp8(record: ShardedParameter) -> bool:
    shape = record.layout.shape
    return (
        len(shape) == 2
        and shape.numel() > 0
        and not any(size % SIZE_UNIT for size in shape)
        and record.format is None
        and not record.is_on_host
        and record.param.dtype is torch.float32
        and not stays_full_precision(record)
    )


def _neighbors(records: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Split records into lists whose shards are adjacent in memory, but for small gaps."""
    ordered = sorted(records, key=lambda record: record.shard.storage_offset())
    found = [[ordered[0]]]
    for before, record in pairwise(ordered):
        if _span([record])[0] - _span([before])[1] <= MAX_GAP_NUMEL:
            found[-1].append(record)
        else:
            found.append([record])
    return found


def _span(members: Sequence[ShardedParameter]) -> tuple[int, int]:
    """Return the range of elements of the flat buffer that holds these shards, in memory order."""
    first, last = members[0].shard, members[-1].shard
    return first.storage_offset(), last.storage_offset() + last.numel()
