"""Exchange updates of matrices between the ranks of their shards and their owners.

Parameters are stepped in buckets of neighbors in a flat run, which bounds the memory of full updates. In a bucket each
matrix has one owner, the rank with the least work so far. Matrices of one shape and owner are transformed as a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.matrix_rules import MatrixRule, Tensors, at_least_float32
from lightning_zero.sharding.layout import ShardLayout

Wait = Callable[[], None]
Start = Callable[[str, SequenceId, Callable[[bool], dist.Work | None]], Wait]


@dataclass(frozen=True)
class MatrixGroup:
    """The ranks that hold each matrix together.

    Attributes:
        group: Process group of these ranks.
        rank: This rank in the group.
        shard_of_rank: Index of the shard that each rank of the group holds.
        start: Starts a collective, and returns a function that waits for it; see :meth:`Executor.start_collective`.
    """

    group: dist.ProcessGroup | None
    rank: int
    shard_of_rank: tuple[int, ...]
    start: Start

    @classmethod
    def from_mesh(cls, mesh: Mesh, start: Start) -> MatrixGroup:
        ranks = mesh.shard_group
        return cls(ranks.gather_group, ranks.rank, _shards_of_ranks(mesh), start)

    @property
    def size(self) -> int:
        return len(self.shard_of_rank)

    def start_all_to_all(self, out: Tensor, values: Tensor, out_sizes: list[int], sizes: list[int]) -> Wait:
        """Start to send ``sizes[i]`` elements to rank i, and to receive ``out_sizes[i]`` from it. Collective."""
        return self.start(
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
        run: The flat run; None in an estimate.
        begin, end: Range of the run's elements.
        layouts: Layouts of the members, in the order of memory.
        owners: For each member, the rank of the group that transforms it.
    """

    run: FlatRun | None
    begin: int
    end: int
    layouts: tuple[ShardLayout, ...]
    owners: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shards."""
        return self.end - self.begin

    def owned_by(self, rank: int) -> list[ShardLayout]:
        return [layout for layout, owner in zip(self.layouts, self.owners, strict=True) if owner == rank]

    def workspace_bytes(self, rule: MatrixRule, group: MatrixGroup) -> int:
        """Return the bytes that this rank's transforms allocate."""
        return _workspace_bytes(self.owned_by(group.rank), rule)

    def received_numel(self, group: MatrixGroup) -> int:
        """Return the number of elements that this rank receives."""
        return group.size * sum(layout.shard_numel for layout in self.owned_by(group.rank))

    @property
    def shared(self) -> list[dict[str, Tensor]]:
        """The members' state that every rank stores in full."""
        if self.run is None or not self.run.shared:
            return [{} for _ in self.layouts]
        begins = list(accumulate([0, *(record.layout.shard_numel for record in self.run.members)]))
        first = begins.index(self.begin)
        return self.run.shared[first : first + len(self.layouts)]

    @property
    def shared_values(self) -> list[Tensor]:
        """The tensors of :attr:`shared`, in order."""
        return [value for state in self.shared for value in state.values()]

    @property
    def shared_numel(self) -> int:
        return sum(value.numel() for value in self.shared_values)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The members' ranges of elements, relative to ``begin``."""
        ends = list(accumulate(layout.shard_numel for layout in self.layouts))
        return list(zip([0, *ends], ends, strict=False))


def make_buckets(run: FlatRun, rule: MatrixRule, max_bytes: int, loads: list[float]) -> list[MatrixBucket]:
    """Divide a run into buckets of full updates, with at least one parameter each.

    Args:
        run: A flat run of parameters with this rule.
        rule: Their rule.
        max_bytes: Limit for the full updates of each rank. With several ranks, a bucket has half of it: two are in
            memory, because one is exchanged while the other one is transformed.
        loads: Operations of each rank so far; updated.
    """
    return _make_buckets(run, [record.layout for record in run.members], rule, max_bytes, loads)


def _make_buckets(
    run: FlatRun | None, members: Sequence[ShardLayout], rule: MatrixRule, max_bytes: int, loads: list[float]
) -> list[MatrixBucket]:
    buckets: list[MatrixBucket] = []
    begin = 0
    for layouts in _divide(members, rule, max_bytes, len(loads)):
        end = begin + sum(layout.shard_numel for layout in layouts)
        buckets.append(MatrixBucket(run, begin, end, layouts, _assign(layouts, rule, loads)))
        begin = end
    return buckets


def _divide(
    layouts: Sequence[ShardLayout], rule: MatrixRule, max_bytes: int, ranks: int
) -> Iterator[tuple[ShardLayout, ...]]:
    """Yield the neighbors of each bucket, see :func:`make_buckets`."""
    most = max_bytes if ranks == 1 else max_bytes / 2 * ranks
    members: list[ShardLayout] = []
    for layout in layouts:
        numel = sum(member.numel for member in members) + layout.numel
        if members and numel * rule.dtype.itemsize > most:
            yield tuple(members)
            members = []
        members.append(layout)
    if members:
        yield tuple(members)


def _assign(layouts: Sequence[ShardLayout], rule: MatrixRule, loads: list[float]) -> tuple[int, ...]:
    """Assign the largest matrices first, each to the rank with the least work."""
    costs = [_cost(layout, rule) for layout in layouts]
    owners = [0] * len(layouts)
    for index in sorted(range(len(layouts)), key=lambda index: (-costs[index], index)):
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        owners[index], loads[owner] = owner, loads[owner] + costs[index]
    return tuple(owners)


def _cost(layout: ShardLayout, rule: MatrixRule) -> float:
    number, rows, columns = rule.matrices(layout.shape)
    return number * rule.flops(rows, columns)


# Difference of the ranks' work, as a share of its mean, below which owners stay, and the most changes. Chosen so that
# eight ranks differ by less than 5 % with the 224 matrices of an 8B Llama.
EVEN_SHARE, MAX_CHANGES = 0.02, 64


def even_out(
    buckets: Sequence[MatrixBucket], rules: Sequence[MatrixRule], loads: list[float]
) -> Sequence[MatrixBucket]:
    """Return buckets with other owners, so that ranks have about equal work.

    The last bucket cannot level all differences. So a rank with the most work swaps matrices of one bucket with the
    rank with the least work.

    Args:
        rules: The rule of each bucket.
        loads: Operations of each rank; updated.
    """
    costs = [[_cost(layout, rule) for layout in b.layouts] for b, rule in zip(buckets, rules, strict=True)]
    owners = [list(bucket.owners) for bucket in buckets]
    for _ in range(MAX_CHANGES):
        high, low = (choose(range(len(loads)), key=loads.__getitem__) for choose in (max, min))
        gap = loads[high] - loads[low]
        if gap <= EVEN_SHARE * sum(loads) / len(loads):
            break
        swaps = [
            (abs(gap / 2 - more + less), number, i, j)
            for number, (values, ranks) in enumerate(zip(costs, owners, strict=True))
            for i, more in enumerate(values)
            if ranks[i] == high
            for j, less in [(-1, 0.0), *((j, cost) for j, cost in enumerate(values) if ranks[j] == low)]
            if 0 < more - less < gap
        ]
        if not swaps:
            break
        _, number, i, j = min(swaps)
        moved = costs[number][i] - (costs[number][j] if j >= 0 else 0.0)
        owners[number][i] = low
        if j >= 0:
            owners[number][j] = high
        loads[high], loads[low] = loads[high] - moved, loads[low] + moved
    return [replace(bucket, owners=tuple(ranks)) for bucket, ranks in zip(buckets, owners, strict=True)]


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
    buckets: list[MatrixBucket] = []
    rules: list[MatrixRule] = []
    for rule, layouts in members:
        buckets += _make_buckets(None, layouts, rule, max_bytes, loads)
        rules += [rule] * (len(buckets) - len(rules))
    numels: dict[torch.dtype, int] = {}
    workspace = 0
    for bucket, rule in zip(even_out(buckets, rules, loads), rules, strict=True):
        numel = bucket.numel
        for rank in range(ranks):
            owned = bucket.owned_by(rank)
            numel = max(numel, ranks * sum(layout.shard_numel for layout in owned))
            workspace = max(workspace, _workspace_bytes(owned, rule))
        numels[rule.dtype] = max(numels.get(rule.dtype, 0), numel)
    copies = _copies(ranks, len(buckets))
    return UpdateMemory(copies * sum(numel * dtype.itemsize for dtype, numel in numels.items()), workspace)


def _workspace_bytes(layouts: Sequence[ShardLayout], rule: MatrixRule) -> int:
    """Return the bytes that the transforms of these layouts allocate, one batch after the other."""
    numels: Counter[Hashable] = Counter()
    for layout in layouts:
        number, rows, columns = rule.matrices(layout.shape)
        # The full updates of all shards. Those of one shard may be views.
        views = rule.transform_batches is not None and layout.world_size == 1 and layout.order is None
        gathered = 0 if views else rows * columns
        numels[rule.batch_key(layout.shape)] += int(number * (gathered + rule.workspace(rows, columns)))
    return max(numels.values(), default=0) * rule.dtype.itemsize


def _copies(ranks: int, buckets: int) -> int:
    """Return the number of buffers: of updates, of parts sent and returned, and of parts received."""
    if ranks == 1:  # the next bucket is prepared while one is transformed
        return 2 if buckets > 1 else 1
    # Three buckets are received at once: the next one, the one that is transformed, and the one that is sent back.
    return 6 if buckets > 1 else 3


ExchangeMemory = dict[torch.dtype, list[Tensor]]


def make_exchanges(
    buckets: Sequence[MatrixBucket],
    rules: Sequence[MatrixRule],
    group: MatrixGroup,
    device: torch.device,
    memory: ExchangeMemory,
) -> list[MatrixExchange]:
    """Return an exchange for each bucket. They share memory; :class:`MatrixExchange` says how.

    Args:
        rules: The rule of each bucket.
        memory: Memory of earlier exchanges, which is replaced where it is too small.
    """
    copies = _copies(group.size, len(buckets))
    for bucket, rule in zip(buckets, rules, strict=True):
        dtype = rule.dtype
        numel = max(bucket.numel, bucket.received_numel(group))
        old = memory.get(dtype, [])
        if len(old) < copies or old[0].numel() < numel:
            most = max([numel, *(tensor.numel() for tensor in old)])
            memory[dtype] = [torch.empty(most, dtype=dtype, device=device) for _ in range(max(copies, len(old)))]
    return [
        MatrixExchange(bucket, rule, group, _buffers(memory[rule.dtype], copies, number))
        for number, (bucket, rule) in enumerate(zip(buckets, rules, strict=True))
    ]


class ExchangeBuffers(NamedTuple):
    """Memory of one exchange: 1-D tensors in the rule's dtype, all the same one if there is one rank."""

    update: Tensor
    sent: Tensor
    returned: Tensor
    received: Tensor


def _buffers(tensors: Sequence[Tensor], copies: int, number: int) -> ExchangeBuffers:
    if copies <= 2:
        return ExchangeBuffers(*[tensors[number % copies]] * 4)
    update = tensors[0]
    if copies == 6:
        return ExchangeBuffers(update, tensors[1], tensors[2], tensors[3 + number % 3])
    return ExchangeBuffers(update, tensors[1], tensors[1], tensors[2])


class Batch(NamedTuple):
    """Parameters of one layout that this rank owns.

    Attributes:
        parts: For each parameter, the shards' parts as (shards, elements).
        states: For each parameter, the state that every rank stores in full.
    """

    layout: ShardLayout
    parts: list[Tensor]
    states: list[Tensors]


class MatrixExchange:
    """Transforms the updates of one bucket.

    ``pack``, ``start_send``, ``finish_send``, ``transform``, ``start_return``, ``finish_return`` and ``unpack`` follow
    each other. With one rank only ``transform`` is needed.

    The exchanges of neighboring buckets overlap and share buffers. A bucket is packed after ``finish_send`` of the
    bucket before it. It starts to return after ``unpack`` of that bucket.

    Args:
        bucket: The bucket.
        rule: The rule of its run.
        group: The ranks.
        buffers: Memory of at least the bucket's size.

    Attributes:
        update: Updates of this rank's shards, in the order of memory.
        result: The same memory, in the dtype of transformed updates.
        workspace_bytes: Bytes that :meth:`transform` allocates at its peak.
    """

    def __init__(self, bucket: MatrixBucket, rule: MatrixRule, group: MatrixGroup, buffers: ExchangeBuffers) -> None:
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
        self.update = buffers.update[: bucket.numel]
        self.result = self.update.view(rule.result_dtype or rule.dtype)
        self._packed = buffers.sent[: bucket.numel]
        self._returned = buffers.returned[: bucket.numel]
        self._received = buffers.received[: group.size * self._sent[group.rank]].view(group.size, -1)
        self._wait: Wait = lambda: None
        # Row of each shard in what is received.
        self._rows = [group.shard_of_rank.index(shard) for shard in range(group.size)]

    def pack(self) -> None:
        """Order this rank's parts by owner."""
        ranges = self.bucket.ranges
        torch.cat([self.update[slice(*ranges[i])] for i in self._order], out=self._packed)

    def start_send(self) -> None:
        """Start to send parts to the owners. Collective."""
        received = [self._sent[self._group.rank]] * self._group.size
        self._wait = self._group.start_all_to_all(self._received.view(-1), self._packed, received, self._sent)

    def start_return(self) -> None:
        """Start to send transformed parts to the ranks of their shards. Collective."""
        received = [self._sent[self._group.rank]] * self._group.size
        self._wait = self._group.start_all_to_all(self._returned, self._received.view(-1), self._sent, received)

    def finish_send(self) -> None:
        """Wait for parts of other ranks. Collective."""
        self._wait()

    def finish_return(self) -> None:
        """Wait for transformed parts of other ranks. Collective."""
        self._wait()

    def unpack(self) -> None:
        """Put this rank's transformed parts into the order of memory."""
        ranges, begin = self.bucket.ranges, 0
        for i in self._order:
            numel = self.bucket.layouts[i].shard_numel
            self.update[slice(*ranges[i])].copy_(self._returned[begin : begin + numel])
            begin += numel

    def transform(self, scalars: Tensors | None = None) -> None:
        """Transform the matrices of this rank in place, in batches of one shape, or of one kind.

        Args:
            scalars: The rule's scalars, and ``skip``: state does not change if it is not zero.
        """
        batches: dict[Hashable, list[Batch]] = {}
        for batch in self._batches():
            batches.setdefault(self._rule.batch_key(batch.layout.shape), []).append(batch)
        for several in batches.values():
            self._transform_batches(several, scalars or {})

    def _transform_batches(self, batches: Sequence[Batch], scalars: Tensors) -> None:
        # A call of its own frees the tensors of these batches before the next ones.
        rule = self._rule
        together = rule.shared is None and rule.transform_batches is not None
        if together:  # the rule joins them, so parameters of one rank alone are not copied first
            batches = [Batch(layout, [part], []) for layout, parts, _ in batches for part in parts]
        updates = []
        for layout, parts, _ in batches:
            number, rows, columns = rule.matrices(layout.shape)
            updates.append(self._gathered(layout, parts).reshape(len(parts) * number, rows, columns))
        shapes = [own.shape for own in updates]
        if together:
            assert rule.transform_batches is not None
            done = list(rule.transform_batches(updates))
        elif rule.shared is not None:
            done = [self._transform_with_state(own, b.states, scalars) for own, b in zip(updates, batches, strict=True)]
        else:
            done = [rule.transform(own) for own in updates]
        del updates
        if (found := [own.shape for own in done]) != shapes:
            raise ValueError(
                f"The transform of a MatrixRule returned updates of shapes {[*map(tuple, found)]}, not "
                f"{[*map(tuple, shapes)]}. Return the shapes of the updates: (number, rows, columns)."
            )
        for (layout, parts, _), own in zip(batches, done, strict=True):
            self._scatter(layout, parts, own.reshape(len(parts), *layout.shape))

    def _transform_with_state(self, updates: Tensor, states: list[Tensors], scalars: Tensors) -> Tensor:
        rule, (rows, columns) = self._rule, updates.shape[1:]
        assert rule.shared is not None
        assert rule.transform_with_state is not None, "a rule with shared state needs transform_with_state"
        old = {
            name: torch.stack([state[name] for state in states]).view(-1, *shape)
            for name, shape in rule.shared(rows, columns).items()
        }
        wide = {name: at_least_float32(value) for name, value in old.items()}
        done, new = rule.transform_with_state(updates, wide, scalars)
        for name, value in new.items():
            kept = value if "skip" not in scalars else torch.where(scalars["skip"] == 0, value, wide[name])
            for state, one in zip(states, kept.reshape(len(states), -1), strict=True):
                state[name].copy_(one.view(state[name].shape))
        return done.to(updates.dtype)

    def publish_state(self, flat: Tensor) -> None:
        """Write the shared state of matrices that this rank owns, and zeros for others, into ``flat``."""
        states = zip(self.bucket.shared, self.bucket.owners, strict=True)
        values = [
            (value if owner == self._group.rank else torch.zeros_like(value)).reshape(-1).to(flat.dtype)
            for state, owner in states
            for value in state.values()
        ]
        torch.cat(values, out=flat)

    def receive_state(self, flat: Tensor) -> None:
        """Read the shared state of all matrices from ``flat``."""
        values = self.bucket.shared_values
        for value, new in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(new.view(value.shape))

    def _batches(self) -> Iterator[Batch]:
        layouts, several = self.bucket.layouts, self._group.size > 1
        begins = dict(zip(self._owned, accumulate([0, *(layouts[i].shard_numel for i in self._owned)]), strict=False))
        ranges = self.bucket.ranges
        shared = self.bucket.shared
        for layout, members in groupby(self._owned, key=lambda i: layouts[i]):
            indices = list(members)
            firsts = [begins[i] if several else ranges[i][0] for i in indices]
            parts = [self._received[:, begin : begin + layout.shard_numel] for begin in firsts]
            yield Batch(layout, parts, [shared[i] for i in indices])

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
        dtype = self._rule.result_dtype or self._rule.dtype
        for part, one in zip(parts, done, strict=True):
            part = part.view(dtype)
            flat = layout.permute_to_memory(one).reshape(-1)
            for shard, row in enumerate(self._rows):
                begin, end = layout.shard_range(shard)
                part[row, : end - begin].copy_(flat[begin:end])
