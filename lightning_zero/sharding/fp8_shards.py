"""Factors and shards of weights that compiled code gathers in fp8.

Each matrix has one factor: the largest absolute value in the master shards of all ranks, over the largest fp8 number.
:class:`Fp8Shards` computes all factors with one all-reduce, and divides this rank's shards by them. The executor
gathers the result, see ``csrc/weights/compute_shards.h``. Factors and shards keep their addresses, which CUDA graphs
read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.flat_memory import ShardMemory, compute_dtype_of, stays_full_precision
from lightning_zero.sharding.fp8_cast import RowCast, cast_rows, compile_cast
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter
from lightning_zero.sharding.shard_tensor import without_shard_dispatch
from lightning_zero.sharding.symm_mem import SymmetricMemory
from lightning_zero.sharding.weight_reader import ShardSync

log = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
# Bounds a maximum from below, so that the factor of a matrix of zeros is not zero.
MIN_AMAX = 1e-12
SIZE_UNIT = 16  # of rows and columns of a matrix that ``torch._scaled_mm`` reads
# The first exchanges of the factors with flags of gathered dtypes; later ones have them at powers of two.
OFTEN_UNTIL = 16
MAX_COMPILED_RUNS = 8  # a compilation takes seconds, and shards of most models are one run
# Elements between two fp8 shards that are cast with them, because a kernel launch takes longer. About a norm's.
MAX_GAP_NUMEL = 1 << 14


def fp8_shards_conflict(config: EngineConfig, mesh: Mesh) -> str | None:
    """Return what excludes fp8 shards, although the options ask for them; None if nothing does."""
    conflicts = {
        "there are several hosts": mesh.inter_host is not None,
        f"memory={config.memory!r}": config.memory is not None,
        "grad_aliasing=True": bool(config.tuning.grad_aliasing),
        f"offload={config.offload!r}": "parameters" in config.offload,
        "master weights are not float32": config.compute_dtype is None,
    }
    return next((what for what, applies in conflicts.items() if applies), None)


def uses_fp8_shards(config: EngineConfig, mesh: Mesh) -> bool:
    """Return True if compiled code gathers weights in fp8. The result is the same on every rank."""
    wanted = config.tuning.fp8_shards and config.linear_dtype == "fp8" and config.compile
    return wanted and fp8_shards_conflict(config, mesh) is None


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


class GatheredDtypes:
    """Tells which weights compiled code has gathered in which dtypes, on any rank.

    Flags of all ranks travel in the all-reduce of the factors. The host reads them one step later, so that it need not
    wait for the device.

    Args:
        dtypes: compute dtype, and the dtype of fp8 shards.
    """

    def __init__(self, executor: Executor, dtypes: Sequence[torch.dtype]) -> None:
        self._executor, self._dtypes = executor, dtypes
        self._sent = 0
        self._flags: Tensor | None = None  # on the CPU, one row for each dtype
        self._arrival: torch.cuda.Event | None = None

    def begin_stage(self) -> None:
        """Exchange flags often again, because there may be new graphs."""
        self._sent = 0

    def local(self) -> list[list[int]]:
        """Return the indices of parameters that this rank has gathered, for each dtype."""
        return [self._executor.weights.gathered_in(dtype) for dtype in self._dtypes]

    def flags(self, count: int) -> Tensor | None:
        """Return this rank's flags, one for each dtype and each of ``count`` parameters, in 1-D.

        Return None in most later steps: all ranks call it equally often, and graphs are compiled early.
        """
        self._sent += 1
        if self._sent > OFTEN_UNTIL and self._sent & (self._sent - 1):
            return None
        flags = torch.zeros(len(self._dtypes), count)
        for row, indices in zip(flags, self.local(), strict=True):
            row[indices] = 1
        return flags.view(-1).to(self._executor.device)

    def take(self, flags: Tensor) -> None:
        """Start to copy the flags of all ranks to the host."""
        on_gpu = flags.device.type == "cuda"
        self._flags = torch.empty(len(self._dtypes), flags.numel() // len(self._dtypes), pin_memory=on_gpu)
        self._flags.view(-1).copy_(flags, non_blocking=True)
        if on_gpu:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def of_any_rank(self) -> list[list[int]]:
        """Return the indices that the last flags told, for each dtype; empty if they were returned before."""
        flags, self._flags = self._flags, None
        if flags is None:
            return [[] for _ in self._dtypes]
        if self._arrival is not None:
            self._arrival.synchronize()
        return [row.nonzero().view(-1).tolist() for row in flags]


class Fp8Shards:
    """Factors and fp8 shards of one engine's weights.

    Without ``symm_mem``, all ranks gather together, so they also compute factors together before each forward. With it,
    ranks evaluate as often as each likes, and read each other's shards outside of write epochs. They then compute
    factors after each optimizer step, and after other events that all ranks have.

    Args:
        dtype: compute dtype.
        memory: allocates compute shards.
        symm_mem: memory of shards that all ranks read; None if weights are all-gathered.

    Attributes:
        factors: float32, one for each matrix that may be gathered in fp8, equal on all ranks.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        dtype: torch.dtype,
        records: Records,
        memory: ShardMemory,
        symm_mem: SymmetricMemory | None,
    ) -> None:
        self._executor, self._mesh, self._dtype = executor, mesh, dtype
        self._all_records, self._memory, self._symm_mem = records, memory, symm_mem
        self._sync = ShardSync(executor)
        self._gathered = GatheredDtypes(executor, (dtype, DTYPE))
        self._records: list[ShardedParameter] = []
        self._runs: list[_Run] = []
        self._casts: dict[int, RowCast] = {}  # by a run's id
        self._is_current = False  # with `symm_mem`: the factors need no refresh before the next forward
        self.factors = torch.ones(0, dtype=torch.float32, device=mesh.device)

    # -- events

    def before_forward(self) -> bool:
        """Prepare for the forward of a training step. Collective.

        Returns:
            True if gathers read other memory from now on.
        """
        allocated = self._allocate()
        if self._symm_mem is None or allocated or not self._is_current:
            self.refresh()
        return allocated

    def after_step(self, forward_follows: bool) -> None:
        """Write the shards that an optimizer has changed. Collective.

        Args:
            forward_follows: the training step goes on, without another :meth:`before_forward`.
        """
        if self._symm_mem is not None or forward_follows:
            self.refresh()

    def before_evaluation(self) -> None:
        """Prepare for an evaluation forward. Collective if weights are all-gathered."""
        if self._symm_mem is None:
            self.refresh()

    def expire(self) -> None:
        """Refresh before the next training step, unless :meth:`refresh` is called earlier."""
        self._is_current = False

    def begin_stage(self) -> None:
        """Begin a training or evaluation, before which weights and options may have changed."""
        self.expire()
        self._gathered.begin_stage()

    # -- memory

    def _allocate(self) -> bool:
        """Allocate the copies that gathers have needed so far; return True if any is new.

        Until then each gather casts master shards.
        """
        everywhere = self._symm_mem is not None
        compute, fp8 = self._gathered.of_any_rank() if everywhere else self._gathered.local()
        new = [
            record
            for record in self._missing(compute, Role.COMPUTE_SHARD)
            if compute_dtype_of(record.param.dtype, self._dtype) != record.param.dtype
        ]
        new_fp8 = self._missing(fp8, Role.FP8_SHARD)
        if new:
            self._try_allocate(lambda: self._memory.allocate_some_compute_shards(new, self._dtype, self._symm_mem))
        if new_fp8:
            self._try_allocate(lambda: self._allocate_fp8(new_fp8))
        return bool(new or new_fp8)

    def _try_allocate(self, allocate: Callable[[], None]) -> None:
        if self._symm_mem is None:
            allocate()
            return
        try:
            with self._symm_mem.all_or_nothing():
                allocate()
        except UnsupportedError as error:  # on every rank, before a shard was set
            log.warning(
                "fp8 shards: no memory is left that all ranks can read, so gathers send float32 (reason=%s). Pass "
                "gather_transport='collective' to the strategy.",
                error,
            )

    def _missing(self, indices: Sequence[int], role: Role) -> list[ShardedParameter]:
        records = [self._all_records[index] for index in indices]
        return [record for record in records if record.owners and role not in record.memory]

    def _allocate_fp8(self, new: Sequence[ShardedParameter]) -> None:
        """Allocate fp8 shards, those of neighbors contiguous, with gaps where few elements are between them."""
        groups = _neighbors(new)
        sizes = [end - begin for begin, end in map(_span, groups)]
        # As bytes, which every kind of memory has.
        mine, others = (
            (torch.empty(sum(sizes), dtype=torch.uint8, device=self._mesh.device), [])
            if self._symm_mem is None
            else self._symm_mem.empty(sum(sizes), torch.uint8)
        )
        mine.zero_()  # also the gaps, which are written and never read
        parts = zip(*(memory.view(DTYPE).split(sizes) for memory in (mine, *others)), strict=True)
        for members, (own, *peers) in zip(groups, parts, strict=True):
            first = members[0].shard.storage_offset()
            for record in members:
                begin, end = (edge - first for edge in _span([record]))
                record.memory[Role.FP8_SHARD] = own[begin:end]
                self._executor.parameters.set_fp8_shard(
                    record.index, own[begin:end], [peer[begin:end] for peer in peers]
                )
        self._find_runs()

    # -- values

    @without_shard_dispatch
    @torch.inference_mode(False)  # an evaluation may come first, and allocates memory that training writes
    @torch.no_grad()
    def refresh(self) -> None:
        """Compute all factors from the master shards, and write the fp8 shards. Collective."""
        self._find_matrices()
        if not self._records:
            return
        if self._symm_mem is not None:
            self._sync.before_writing(stepping=True)  # other ranks read the shards
        amax = torch.stack(list(foreach_norm([record.shard for record in self._records], math.inf)))
        # Process groups disagree about the maximum of NaN and a number.
        amax = self._all_max(amax.nan_to_num_(nan=math.inf, posinf=math.inf))
        torch.mul(amax.clamp_min_(MIN_AMAX), 1 / torch.finfo(DTYPE).max, out=self.factors)
        scales = torch.cat([self.factors.reciprocal(), self.factors.new_zeros(1)])
        for run in self._runs:
            self._cast(run)(run.masters, scales, run.numbers, run.copies)
        self._executor.weights.mark_fp8_shards_written()
        if self._symm_mem is not None:
            self._sync.after_writing()
        self._is_current = True

    def _cast(self, run: _Run) -> RowCast:
        if self._mesh.device.type != "cuda" or len(self._runs) > MAX_COMPILED_RUNS:
            return cast_rows
        if (cast := self._casts.get(id(run))) is None:
            cast = self._casts[id(run)] = compile_cast(
                run.masters, self.factors.new_ones(len(self.factors) + 1), run.numbers, run.copies
            )
        return cast

    def _all_max(self, amax: Tensor) -> Tensor:
        """Return the maxima over all ranks, and exchange the flags of gathered dtypes."""
        if self._mesh.world_size == 1:
            return amax
        flags = None if self._symm_mem is None else self._gathered.flags(len(list(self._all_records)))
        values = amax if flags is None else torch.cat([amax, flags])
        group = self._mesh.shard_group.gather_group
        self._executor.collective(
            "the largest values of weights",
            SequenceId.GATHER,
            lambda later: dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=later),
        )
        if flags is not None:
            self._gathered.take(values[amax.numel() :])
        return values[: amax.numel()]

    def _find_matrices(self) -> None:
        """Find the matrices that may be gathered in fp8, and tell the executor where their factors are."""
        found = [record for record in self._all_records.live if _may_be_fp8(record)]
        if [record.index for record in found] == [record.index for record in self._records]:
            return
        self._records = found
        self.factors = torch.ones(len(found), dtype=torch.float32, device=self._mesh.device)
        for record, factor in zip(found, self.factors.unbind(), strict=True):
            self._executor.parameters.set_fp8_factor(record.index, factor)
        self._find_runs()

    def _find_runs(self) -> None:
        numbers = {record.index: number for number, record in enumerate(self._records)}
        groups: list[list[ShardedParameter]] = []
        for members in _neighbors([record for record in self._records if Role.FP8_SHARD in record.memory]):
            groups.append(members[:1])
            for before, record in pairwise(members):
                if not _are_alike_apart(before, record):
                    groups.append([])
                groups[-1].append(record)
        self._runs = [self._run(members, numbers) for members in groups]
        self._casts.clear()

    def _run(self, members: list[ShardedParameter], numbers: dict[int, int]) -> _Run:
        begin, end = _span(members)
        edges = [edge - begin for record in members for edge in _span([record])]
        columns = math.gcd(*edges)
        rows = torch.full(((end - begin) // columns,), len(numbers))
        for record in members:
            first, last = _span([record])
            rows[(first - begin) // columns : (last - begin) // columns] = numbers[record.index]
        shards = members[0].shard, members[0].memory[Role.FP8_SHARD]
        masters, copies = (
            shard.as_strided((end - begin,), (1,), shard.storage_offset()).view(-1, columns) for shard in shards
        )
        return _Run(masters, copies, rows.to(self._mesh.device))


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
    found = [ordered[:1]] if ordered else []
    for before, record in pairwise(ordered):
        if _span([record])[0] - _span([before])[1] <= MAX_GAP_NUMEL:
            found[-1].append(record)
        else:
            found.append([record])
    return found


def _span(members: Sequence[ShardedParameter]) -> tuple[int, int]:
    """Return the range of elements of the flat buffer that holds these shards, in memory order."""
    first, last = members[0].shard, members[-1].shard
    return int(first.storage_offset()), int(last.storage_offset()) + last.numel()


def _are_alike_apart(before: ShardedParameter, record: ShardedParameter) -> bool:
    """Return True if the fp8 shards have the same distance in one memory as the master shards."""
    copies = [each.memory[Role.FP8_SHARD] for each in (before, record)]
    apart = copies[1].storage_offset() - copies[0].storage_offset()
    same = copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
    return same and apart == record.shard.storage_offset() - before.shard.storage_offset()
