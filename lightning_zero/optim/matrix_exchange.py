"""Exchange updates of matrices between the ranks of their shards and their owners.

Parameters are stepped in buckets of neighbors in a flat run, which bounds the memory of full updates. In a bucket each
matrix has one owner, the rank with the least work so far. Matrices of one shape and owner are transformed as a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.matrix_rules import MatrixRule, as_matrices
from lightning_zero.sharding.layout import ShardLayout

Start = Callable[[str, SequenceId, Callable[[bool], dist.Work | None]], None]


@dataclass(frozen=True)
class MatrixGroup:
    """The ranks that hold each matrix together.

    Attributes:
        group: Process group of these ranks.
        rank: This rank in the group.
        shard_of_rank: Index of the shard that each rank of the group holds.
        collective: Starts a collective and waits for it, see :meth:`Executor.collective`.
    """

    group: dist.ProcessGroup | None
    rank: int
    shard_of_rank: tuple[int, ...]
    collective: Start

    @classmethod
    def from_mesh(cls, mesh: Mesh, collective: Start) -> MatrixGroup:
        ranks = mesh.shard_group
        return cls(ranks.gather_group, ranks.rank, _shards_of_ranks(mesh), collective)

    @property
    def size(self) -> int:
        return len(self.shard_of_rank)

    def all_to_all(self, out: Tensor, values: Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        """Send ``sizes[i]`` elements to rank i, and receive ``out_sizes[i]`` from it. Collective."""
        self.collective(
            "updates of matrices",
            SequenceId.GATHER,
            lambda later: dist.all_to_all_single(out, values, out_sizes, sizes, group=self.group, async_op=later),
        )


def _shards_of_ranks(mesh: Mesh) -> tuple[int, ...]:
    hosts, size = mesh.shard_host_count, mesh.shard_group.size
    if hosts == 1:
        return tuple(range(size))
    seen = [0] * hosts
    indices = []
    for host in mesh.hosts:
        indices.append(seen[host] * hosts + host)
        seen[host] += 1
    return tuple(indices)


@dataclass(frozen=True)
class MatrixBucket:
    """Neighboring members of a flat run whose full updates exist at one time.

    Attributes:
        run: The flat run.
        begin, end: Range of the run's elements.
        layouts: Layouts of the members, in the order of memory.
        owners: For each member, the rank of the group that transforms it.
    """

    run: FlatRun
    begin: int
    end: int
    layouts: tuple[ShardLayout, ...]
    owners: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shards."""
        return self.end - self.begin

    def workspace_bytes(self, rule: MatrixRule, group: MatrixGroup) -> int:
        """Return the bytes that this rank's transforms allocate."""
        owned = zip(self.layouts, self.owners, strict=True)
        return _workspace_bytes([layout for layout, owner in owned if owner == group.rank], rule)

    def received_numel(self, group: MatrixGroup) -> int:
        """Return the number of elements that this rank receives."""
        owned = zip(self.layouts, self.owners, strict=True)
        return group.size * sum(layout.shard_numel for layout, owner in owned if owner == group.rank)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The members' ranges of elements, relative to ``begin``."""
        ends = list(accumulate(layout.shard_numel for layout in self.layouts))
        return list(zip([0, *ends], ends, strict=False))


def make_buckets(run: FlatRun, rule: MatrixRule, max_bytes: int, loads: list[float]) -> list[MatrixBucket]:
    """Divide a run into buckets of at most ``max_bytes`` for each rank, but at least one parameter.

    Args:
        run: A flat run of parameters with this rule.
        rule: Their rule.
        max_bytes: Limit for the full updates of a bucket, divided by the number of ranks.
        loads: Operations of each rank so far; updated.
    """
    buckets: list[MatrixBucket] = []
    begin = 0
    for layouts in _divide([record.layout for record in run.members], rule, max_bytes * len(loads)):
        end = begin + sum(layout.shard_numel for layout in layouts)
        buckets.append(MatrixBucket(run, begin, end, layouts, _assign(layouts, rule, loads)))
        begin = end
    return buckets


def _divide(layouts: Sequence[ShardLayout], rule: MatrixRule, max_bytes: float) -> Iterator[tuple[ShardLayout, ...]]:
    """Yield neighbors whose full updates have at most ``max_bytes``, but at least one."""
    members: list[ShardLayout] = []
    for layout in layouts:
        numel = sum(member.numel for member in members) + layout.numel
        if members and numel * rule.dtype.itemsize > max_bytes:
            yield tuple(members)
            members = []
        members.append(layout)
    if members:
        yield tuple(members)


def _assign(layouts: Sequence[ShardLayout], rule: MatrixRule, loads: list[float]) -> tuple[int, ...]:
    """Assign the largest matrices first, each to the rank with the least work."""
    costs = []
    for layout in layouts:
        number, rows, columns = as_matrices(layout.shape)
        costs.append(number * rule.flops(rows, columns))
    owners = [0] * len(layouts)
    for index in sorted(range(len(layouts)), key=lambda index: (-costs[index], index)):
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        owners[index], loads[owner] = owner, loads[owner] + costs[index]
    return tuple(owners)


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of the full updates of matrices that one rank has at one time.

    Attributes:
        buffers: Updates that are sent, received and applied, which exist from the first step on.
        workspace: Temporary tensors of the transforms, which captured steps keep.
    """

    buffers: int = 0
    workspace: int = 0


def update_memory(
    members: Sequence[tuple[MatrixRule, Sequence[ShardLayout]]], ranks: int, max_bytes: int
) -> UpdateMemory:
    """Return the memory of the rank that needs most.

    Args:
        members: Rules and the layouts of their parameters, in the order of memory.
        ranks: Number of ranks that hold each matrix together.
        max_bytes: See :func:`make_buckets`.
    """
    loads = [0.0] * ranks
    numels: dict[torch.dtype, int] = {}
    workspace = 0
    for rule, layouts in members:
        for bucket in _divide(layouts, rule, max_bytes * ranks):
            owners = _assign(bucket, rule, loads)
            numel = sum(layout.shard_numel for layout in bucket)
            for rank in range(ranks):
                owned = [layout for layout, owner in zip(bucket, owners, strict=True) if owner == rank]
                numel = max(numel, ranks * sum(layout.shard_numel for layout in owned))
                workspace = max(workspace, _workspace_bytes(owned, rule))
            numels[rule.dtype] = max(numels.get(rule.dtype, 0), numel)
    return UpdateMemory(_copies(ranks) * sum(numel * dtype.itemsize for dtype, numel in numels.items()), workspace)


def _workspace_bytes(layouts: Sequence[ShardLayout], rule: MatrixRule) -> int:
    """Return the bytes that the transforms of these layouts allocate, one batch after the other."""
    most = 0.0
    for shape, count in Counter(layout.shape for layout in layouts).items():
        number, rows, columns = as_matrices(shape)
        gathered = rows * columns  # of all shards, before they are transformed
        most = max(most, count * number * (gathered + rule.workspace(rows, columns)))
    return int(most * rule.dtype.itemsize)


def _copies(ranks: int) -> int:
    return 3 if ranks > 1 else 1


ExchangeMemory = dict[torch.dtype, list[Tensor]]


def make_exchanges(
    buckets: Sequence[MatrixBucket],
    rule_of: Callable[[FlatRun], MatrixRule],
    group: MatrixGroup,
    device: torch.device,
    memory: ExchangeMemory,
) -> list[MatrixExchange]:
    """Return an exchange for each bucket. All use the same memory, one after the other.

    Args:
        memory: What earlier exchanges use, which is replaced where it is too small.
    """
    copies = _copies(group.size)
    for bucket in buckets:
        dtype = rule_of(bucket.run).dtype
        numel = max(bucket.numel, bucket.received_numel(group))
        if dtype not in memory or memory[dtype][0].numel() < numel:
            memory[dtype] = [torch.empty(numel, dtype=dtype, device=device) for _ in range(copies)]
    return [MatrixExchange(bucket, rule_of(bucket.run), group, memory[rule_of(bucket.run).dtype]) for bucket in buckets]


class MatrixExchange:
    """Transforms the updates of one bucket.

    ``pack``, ``send``, ``transform``, ``send_back`` and ``unpack`` follow each other. With one rank only ``transform``
    is needed.

    Args:
        bucket: The bucket.
        rule: The rule of its run.
        group: The ranks.
        memory: 1-D tensors in the rule's dtype: one, or three if there are several ranks.

    Attributes:
        update: Updates of this rank's shards, in the order of memory.
        workspace_bytes: Bytes that :meth:`transform` allocates at its peak.
    """

    def __init__(self, bucket: MatrixBucket, rule: MatrixRule, group: MatrixGroup, memory: Sequence[Tensor]) -> None:
        self.bucket = bucket
        self._rule = rule
        self._group = group
        self.workspace_bytes = bucket.workspace_bytes(rule, group)
        ranges = bucket.ranges
        # Sent in the order of owners, and for each owner by shape, so that a batch is one range.
        self._order = sorted(
            range(len(ranges)), key=lambda i: (bucket.owners[i], bucket.layouts[i].shape, bucket.layouts[i].strides, i)
        )
        self._sent = [
            sum(bucket.layouts[i].shard_numel for i in self._order if bucket.owners[i] == rank)
            for rank in range(group.size)
        ]
        self._owned = [i for i in self._order if bucket.owners[i] == group.rank]
        self.update = memory[0][: bucket.numel]
        self._packed = memory[-2][: bucket.numel] if group.size > 1 else self.update
        received = memory[-1][: group.size * self._sent[group.rank]] if group.size > 1 else self.update
        self._received = received.view(group.size, -1)
        # Row of each shard in what is received.
        self._rows = [group.shard_of_rank.index(shard) for shard in range(group.size)]

    def pack(self) -> None:
        """Order this rank's parts by owner."""
        ranges = self.bucket.ranges
        torch.cat([self.update[slice(*ranges[i])] for i in self._order], out=self._packed)

    def send(self) -> None:
        """Send parts to the owners. Collective."""
        mine = self._sent[self._group.rank]
        self._group.all_to_all(self._received.view(-1), self._packed, [mine] * self._group.size, self._sent)

    def send_back(self) -> None:
        """Send transformed parts to the ranks of their shards. Collective."""
        mine = self._sent[self._group.rank]
        self._group.all_to_all(self._packed, self._received.view(-1), self._sent, [mine] * self._group.size)

    def unpack(self) -> None:
        """Put this rank's transformed parts into the order of memory."""
        ranges, begin = self.bucket.ranges, 0
        for i in self._order:
            numel = self.bucket.layouts[i].shard_numel
            self.update[slice(*ranges[i])].copy_(self._packed[begin : begin + numel])
            begin += numel

    def transform(self) -> None:
        """Transform the matrices of this rank in place, in batches of one shape."""
        for layout, parts in self._batches():
            self._transform_batch(layout, parts)

    def _transform_batch(self, layout: ShardLayout, parts: list[Tensor]) -> None:
        # A call of its own frees the tensors of a batch before the next one.
        full = self._gathered(layout, parts)
        number, rows, columns = as_matrices(layout.shape)
        done = self._rule.transform(full.reshape(len(parts) * number, rows, columns))
        self._scatter(layout, parts, done.reshape(len(parts), *layout.shape))

    def _batches(self) -> Iterator[tuple[ShardLayout, list[Tensor]]]:
        """Yield a layout and, for each of its matrices, the shards' parts as (shards, elements)."""
        layouts, several = self.bucket.layouts, self._group.size > 1
        begins = dict(zip(self._owned, accumulate([0, *(layouts[i].shard_numel for i in self._owned)]), strict=False))
        ranges = self.bucket.ranges
        for layout, indices in groupby(self._owned, key=lambda i: layouts[i]):
            firsts = [begins[i] if several else ranges[i][0] for i in indices]
            yield layout, [self._received[:, begin : begin + layout.shard_numel] for begin in firsts]

    def _gathered(self, layout: ShardLayout, parts: list[Tensor]) -> Tensor:
        """Return full updates of shape (number, *shape)."""
        rows = self._rows
        if len(rows) == 1 and len(parts) == 1:
            return layout.full_view(parts[0].view(-1))[None]
        if rows != list(range(len(rows))):
            parts = [part[rows] for part in parts]
        flat = torch.stack(parts).view(len(parts), -1)[:, : layout.numel]
        full = flat.reshape(len(parts), *layout.memory_shape)
        return torch.stack([layout.permute_from_memory(one) for one in full]) if layout.order else full

    def _scatter(self, layout: ShardLayout, parts: list[Tensor], done: Tensor) -> None:
        for part, one in zip(parts, done, strict=True):
            flat = layout.permute_to_memory(one).reshape(-1)
            for shard, row in enumerate(self._rows):
                begin, end = layout.shard_range(shard)
                part[row, : end - begin].copy_(flat[begin:end])
