"""Flat runs: neighboring shards that an optimizer steps as one tensor, and their chunks.

An elementwise optimizer does the same to a run of neighboring shards as to each of them, with fewer kernels. Its own
parameters, groups and state keep their identity and shapes: each parameter's state is a view of its run's state. Runs
are stepped in chunks if their state is on the host, or if temporary memory must be small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import RingPass, StagedChunk, StagedChunks, StagingRing, copy_outside_values
from lightning_zero.optim.bf16_state import ROUNDING_COUNT, ElementPositions
from lightning_zero.optim.quantized_state import SCALES, codes_key, is_quantized, scales_key
from lightning_zero.optim.state_dtypes import NO_ROUNDING, Rounding, StoredDtypes
from lightning_zero.optim.support import INSTEAD, large_tensors
from lightning_zero.sharding.layout import STATE_BLOCK
from lightning_zero.sharding.param_record import Role, ShardedParameter

State = defaultdict[Any, dict[str, Any]]


@dataclass(eq=False)
class FlatRun:
    """Shards that are stepped as one tensor.

    Attributes:
        param: All members, flat, with the number of dimensions that all have, or 1-D. ``.grad`` is set unless it has
            another dtype.
        counts: The members' 0-dim state (such as step counts) by name, as one 1-D tensor.
        stored_dtypes: Dtypes of the state that is rounded after a step, by name in the rule's order.
        rounds_param: ``param`` is bfloat16, and rounded stochastically.
        on_host: Host view of ``param`` if it is offloaded.
        copy: Compute shards of the members, which captured steps write, and all steps of offloaded members; None if
            there are none, or if peers may read them.
        shared: For each member, state of its own shape that every rank stores in full, by name.
        shared_names: Names of such state.
        copied: True if the last step has written all of ``copy``.
    """

    group: int
    members: list[ShardedParameter]
    param: nn.Parameter
    grad: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    shared: list[dict[str, Tensor]] = field(default_factory=list)
    shared_names: frozenset[str] = frozenset()
    stored_dtypes: StoredDtypes = field(default_factory=dict)
    rounds_param: bool = False
    on_host: Tensor | None = None
    copy: Tensor | None = None
    copied: bool = False
    _exported: dict[str, Any] = field(default_factory=dict)

    @property
    def grad_is_copy(self) -> bool:
        """True if the gradient's memory is :attr:`copy`, which a step may write once it has read the gradient."""
        return self.copy is not None and self.copy.data_ptr() == self.grad.data_ptr()

    @property
    def aliases_compute_shard(self) -> bool:
        """True if gradients alias compute shards, in another dtype than ``param``."""
        return self.grad.dtype != self.param.dtype

    def set_param_grad(self) -> None:
        """Set ``param.grad`` in the dtype of ``param``, by a copy if needed."""
        self.param.grad = self.grad.to(self.param.dtype)

    def drop_aliased_gradient(self) -> None:
        """Clear gradients that alias compute shards, after a step has used them."""
        if self.aliases_compute_shard:
            self.param.grad = None
            for record in self.members:
                record.param.grad = None

    @property
    def rounds(self) -> bool:
        """True if weights or state are rounded after each step, by noise that depends on the step count."""
        return self.rounds_param or bool(self.stored_dtypes)

    @property
    def code_dtypes(self) -> StoredDtypes:
        """Dtypes of the codes of 8-bit state, by name."""
        return {name: dtype for name, dtype in self.stored_dtypes.items() if is_quantized(dtype)}

    def keys_of(self, names: Iterable[str]) -> list[str]:
        """Return the keys under which state of these names is stored: of 8-bit state, codes and scales."""
        codes = self.code_dtypes
        return [k for name in names for k in ((codes_key(name), scales_key(name)) if name in codes else (name,))]

    @property
    def elementwise(self) -> list[str]:
        """Keys of the state that is divided like the members."""
        return [k for k, value in self.state.items() if isinstance(value, Tensor) and not _is_count(k, value)]

    def join_state(self, state: State, host: HostMemory | None = None) -> bool:
        """Join the members' state into this run's, and make the members' state views of it.

        State that is not contiguous, not on the right device (``host`` if given) or not in its stored dtype is copied.
        Return True if any was copied.
        """
        own = [state[record.param] for record in self.members if record.param in state]
        if len(own) != len(self.members):
            return False
        moved = False
        for key in own[0]:
            if key in self.shared_names:
                continue
            values = [entries[key] for entries in own]
            if not key.endswith(SCALES):
                values = [_rank_part(record, value) for record, value in zip(self.members, values, strict=True)]
            first = values[0]
            if not isinstance(first, Tensor):
                self.state[key] = first
                continue
            if key == ROUNDING_COUNT:  # torch loads state in the parameter's dtype, and bfloat16 counts only to 256
                values = [value.float() for value in values]
            joined = _contiguous_view(values)
            if _is_count(key, first):
                counts = torch.stack([value.reshape(()) for value in values]) if joined is None else joined
                self.counts[key], self.state[key] = counts, counts[0]
            else:
                if not key.endswith(SCALES):
                    self.check(key, first, self.members[0].layout.visible_shape)
                dtype = self.stored_dtype(key, first)
                if joined is not None and not (self._is_in_place(joined, host) and joined.dtype is dtype):
                    joined = None
                flat = self._concatenate(values, dtype, host) if joined is None else joined
                self.state[key] = flat if key.endswith(SCALES) else flat.view(self.param.shape)
            moved = moved or joined is None
            del values
            self._export(key, state)  # one at a time, so that at most one of them exists twice
        return moved

    def move_counts(self, device: torch.device) -> bool:
        """Move counts to this device; :meth:`export_state` publishes them. Return True if any moved."""
        away = {key: counts for key, counts in self.counts.items() if counts.device != device}
        for key, counts in away.items():
            self.counts[key] = counts.to(device)
            self.state[key] = self.counts[key][0]
        return bool(away)

    def read_non_tensor_state(self, state: State) -> None:
        """Read non-tensor state from the members, where the optimizer may have changed it."""
        own = state.get(self.members[0].param, {})
        self.state.update({k: own[k] for k, v in self.state.items() if not isinstance(v, Tensor) and k in own})

    def export_state(self, state: State) -> None:
        """Publish this run's state as the members' state, as far as it is new."""
        for key, value in self.state.items():
            if key in self._exported and self._exported[key] is value:
                continue
            if isinstance(value, Tensor) and _is_count(key, value):
                counts = self.counts.get(key)
                if counts is None or counts.data_ptr() != value.data_ptr():
                    self.counts[key] = counts = value.detach().reshape(1).repeat(len(self.members))
                    self.state[key] = counts[0]
            self._export(key, state)

    def _export(self, key: str, state: State) -> None:
        value = self._exported[key] = self.state[key]
        begin = 0
        for position, record in enumerate(self.members):
            end = begin + record.layout.shard_numel
            if key in self.counts:
                state[record.param][key] = self.counts[key][position]
            elif isinstance(value, Tensor) and key.endswith(SCALES):
                state[record.param][key] = value[begin // STATE_BLOCK : end // STATE_BLOCK]
            elif isinstance(value, Tensor):
                self.check(key, value, self.param.shape)
                chunk = value.view(-1)[begin:end].view(record.layout.visible_shape)
                # Reductions by users then return the full value's. Codes have no such meaning.
                state[record.param][key] = chunk if is_quantized(value.dtype) else record.spec.wrap(chunk)
            else:
                self._check_number(key, value)
                state[record.param][key] = value
            begin = end

    def _check_number(self, key: str, value: Any) -> None:
        if large := large_tensors(value):
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} for {self.members[0].name!r} that is a {type(value).__name__} "
                f"with a tensor of shape {tuple(large[0].shape)}. Only tensors themselves can be divided among the "
                f"parameters that are stepped together. {INSTEAD}"
            )

    def broadcast_counts(self) -> None:
        """Copy the first member's counts, which the optimizer has changed, to the others."""
        for counts in self.counts.values():
            if counts.numel() > 1:
                counts[1:] = counts[0]

    def _is_in_place(self, value: Tensor, host: HostMemory | None) -> bool:
        return value.device == self.param.device if host is None else host.holds(value)

    def stored_dtype(self, key: str, value: Tensor) -> torch.dtype:
        """Return the dtype in which this elementwise state is stored."""
        return self.stored_dtypes.get(key, value.dtype) if value.is_floating_point() else value.dtype

    def empty(self, dtype: torch.dtype, host: HostMemory | None, per_block: bool = False) -> Tensor:
        """Return new 1-D memory for elementwise state, or for one element per block of 8-bit state."""
        numel = self.param.numel() // (STATE_BLOCK if per_block else 1)
        return torch.empty(numel, dtype=dtype, device=self.param.device) if host is None else host.empty(numel, dtype)

    def allocate_state(self, name: str, dtype: torch.dtype, host: HostMemory | None) -> list[Tensor]:
        """Allocate the tensors that store state of this name, unless they exist, and return the new ones."""
        keys = (codes_key(name), scales_key(name)) if is_quantized(dtype) else (name,)
        if keys[0] in self.state:
            return []
        self.state[keys[0]] = self.empty(dtype, host).view(self.param.shape)
        for key in keys[1:]:
            self.state[key] = self.empty(torch.float32, host, per_block=True)
        return [self.state[key] for key in keys]

    def _concatenate(self, values: Sequence[Tensor], dtype: torch.dtype, host: HostMemory | None) -> Tensor:
        numel = sum(value.numel() for value in values)
        flat = self.empty(dtype, host, per_block=numel < self.param.numel())
        for piece, value in zip(flat.split([value.numel() for value in values]), values, strict=True):
            piece.copy_(value.detach().reshape(-1))
        return flat

    def check(self, key: str, value: Tensor, shape: torch.Size) -> None:
        """Raise :class:`UnsupportedError` if state is no plain tensor, or not of ``shape``."""
        if type(value) not in (Tensor, nn.Parameter) and "_zero_spec" not in value.__dict__:
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} for {self.members[0].name!r} that is a {type(value).__name__}, "
                f"which cannot be divided among the parameters that are stepped together. {INSTEAD}"
            )
        if value.shape != shape:
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} of shape {tuple(value.shape)} for {self.members[0].name!r}, "
                f"whose shard it sees as {tuple(shape)}: it does not treat elements one by one, and each rank holds "
                "only a flat shard of every parameter. Use an optimizer that does, such as AdamW, SGD or Lion."
            )


def _is_count(key: str, value: Tensor) -> bool:
    return value.numel() == 1 and not key.endswith(SCALES)  # a shard has more elements: see ShardLayout


def make_flat_runs(
    groups: Sequence[Sequence[ShardedParameter]],
    kinds: Mapping[int, Any],
    mix_dimensions: bool,
    stored_dtypes: Mapping[int, StoredDtypes] | None = None,
    one_per_parameter: bool = False,
    rounding: Rounding = NO_ROUNDING,
    writes_copies: bool = False,
) -> list[FlatRun]:
    """Return the flat runs of the parameters in ``groups``, all of which have a gradient.

    Args:
        kinds: A value for parameters with the same history and rule, by index; only those are joined.
        writes_copies: steps may write compute shards of parameters on the device, too.
    """
    dtypes = stored_dtypes or {}
    runs: list[FlatRun] = []
    for number, records in enumerate(groups):
        members: list[ShardedParameter] = []
        # One order on all ranks, which exchange matrices in it: each dtype has memory of its own, at any address.
        for record in sorted(records, key=lambda r: (str(r.shard.dtype), r.shard.data_ptr())):
            same_state = members and dtypes.get(members[-1].index) == dtypes.get(record.index)
            if members and (
                one_per_parameter or not same_state or not _joins(members[-1], record, kinds, mix_dimensions)
            ):
                runs.append(_make_run(number, members, dtypes, rounding, writes_copies))
                members = []
            members.append(record)
        if members:
            runs.append(_make_run(number, members, dtypes, rounding, writes_copies))
    return runs


def _joins(last: ShardedParameter, record: ShardedParameter, kinds: Mapping[int, Any], mix_dimensions: bool) -> bool:
    before, after = last.param.grad, record.param.grad
    assert before is not None
    assert after is not None
    return (
        _adjacent(last.shard, record.shard)
        and _adjacent(before, after)
        and kinds.get(last.index) == kinds.get(record.index)
        and (mix_dimensions or last.param.dim() == record.param.dim())
    )


def _adjacent(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.data_ptr() + a.nbytes == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _rank_part(record: ShardedParameter, value: Any) -> Any:
    """Return this rank's part of a full value that a user has put into the state; other values unchanged."""
    if isinstance(value, Tensor) and value.numel() > 1 and value.shape != record.layout.visible_shape:
        return record.local_part(value) if value.shape == record.layout.shape else value
    return value


def _contiguous_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one 1-D view of tensors that are adjacent in memory; None if they are not."""
    first = tensors[0]
    if not all(p.is_contiguous() for p in tensors) or not all(map(_adjacent, tensors, tensors[1:])):
        return None
    return first.detach().as_strided((sum(p.numel() for p in tensors),), (1,), first.storage_offset())


def _make_run(
    group: int,
    members: list[ShardedParameter],
    stored_dtypes: Mapping[int, StoredDtypes],
    rounding: Rounding,
    writes_copies: bool,
) -> FlatRun:
    flat = _contiguous_view([record.shard for record in members])
    grad = _contiguous_view([record.param.grad for record in members if record.param.grad is not None])
    assert flat is not None
    assert grad is not None
    dims = {record.param.dim() for record in members}
    shape = (1,) * (dims.pop() - 1) + (flat.numel(),) if len(dims) == 1 else (flat.numel(),)
    param = nn.Parameter(flat.view(shape))
    run = FlatRun(
        group,
        members,
        param,
        grad.view(shape),
        stored_dtypes=stored_dtypes.get(members[0].index, {}),
        rounds_param=rounding.rounds_weights(flat.dtype),
    )
    if not run.aliases_compute_shard:
        run.set_param_grad()
    on_host = [record.on_host for record in members if record.on_host is not None]
    if len(on_host) == len(members):
        run.on_host = _contiguous_view(on_host)
        assert run.on_host is not None
    if writes_copies or run.on_host is not None:
        copies = [record.memory[Role.COMPUTE_SHARD] for record in members if Role.COMPUTE_SHARD in record.memory]
        run.copy = _contiguous_view(copies) if len(copies) == len(members) else None
    return run


MAX_CHUNK_NUMEL = 1 << 22  # elements that are float32 at a time; bounds the memory of a step that is not compiled
MASTER_SHARD = "master shard"  # key next to the names of state, which are identifiers


@dataclass(frozen=True)
class StateOnHost:
    """Host memory of one engine's shard-sized optimizer state, and its staging ring."""

    memory: HostMemory
    ring: StagingRing


@dataclass(frozen=True)
class Chunk:
    """Neighboring elements of a flat run, stepped at once."""

    run: FlatRun
    begin: int
    end: int

    def view_of(self, flat: Tensor) -> Tensor:
        """Return this chunk's part of a tensor with the run's elements or blocks, as a 1-D view."""
        share = self.run.param.numel() // flat.numel()
        return flat.detach().view(-1)[self.begin // share : self.end // share]

    def load(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return this chunk's part of the run's state by key, and of offloaded master shards.

        Master shards are first: their place in the staging buffer then does not depend on the state.
        """
        master = {} if self.run.on_host is None else {MASTER_SHARD: self.view_of(self.run.on_host)}
        return master | {key: self.view_of(self.run.state[key]) for key in keys}

    def positions(self, whole: Mapping[int, ElementPositions]) -> ElementPositions | None:
        """Return the positions of this chunk's elements; None if its run has none."""
        positions = whole.get(id(self.run))
        return None if positions is None else positions.part(self.begin, self.end)


class LoadedChunk(NamedTuple):
    """A chunk on the device.

    Attributes:
        copy: Its compute shard, if the step writes it; otherwise None.
        positions: Positions of its elements if state or weights are rounded.
    """

    chunk: Chunk
    param: Tensor
    copy: Tensor | None
    state: dict[str, Tensor]
    positions: ElementPositions | None


def chunk_numel(run: FlatRun, keys: Sequence[str], ring: StagingRing | None, itemsizes: Sequence[int] = ()) -> int:
    """Return the elements of a chunk whose state and master shards fit into a slot of the ring.

    Args:
        keys: Of the state that is copied from the host.
        itemsizes: Bytes per element of state that is not made yet.
    """
    state = [run.state[key].nbytes / run.param.numel() for key in keys] or list(itemsizes)
    sizes = [*state, *([] if run.on_host is None else [run.on_host.itemsize])]
    return ring.elements(sizes, STATE_BLOCK if run.code_dtypes else 32) if ring and sizes else run.param.numel()


def split_into_chunks(run: FlatRun, max_numel: int, ends: Sequence[int] = ()) -> list[Chunk]:
    """Split a run into chunks of at most ``max_numel`` elements, and at ``ends``.

    ``ends`` is empty or includes the end of the run.
    """
    parts = zip([0, *ends], ends or [run.param.numel()], strict=False)
    return [
        Chunk(run, begin, min(begin + max_numel, last))
        for first, last in parts
        for begin in range(first, last, max_numel)
    ]


class InPlacePass:
    """Replaces the staging ring's ``RingPass`` for state on the device, which needs no copies."""

    def __init__(self, loads: Sequence[StagedChunk]) -> None:
        self._loads = loads

    def prefetch(self) -> None:
        pass

    def open(self, number: int) -> dict[str, Tensor]:
        return dict(self._loads[number])

    def close(self, number: int, load: StagedChunk | None = None, values: StagedChunk | None = None) -> None:
        copy_outside_values(values, self._loads[number] if load is None else load)

    def flush(self) -> None:
        pass

    def rejoin(self) -> None:
        pass


class ChunkedState:
    """Flat runs in chunks, and the transfer of each chunk's state.

    Args:
        ring: Staging ring; None if state is on the device, and runs are not split.
        keys: Returns the keys of a run's state that is transferred.
        max_numel: Maximum number of elements of a chunk; None: no limit.
        ends: Where chunks of a run must end, by run id.

    Attributes:
        chunks: All chunks, in the order in which they are stepped.
        positions: Element positions of the runs whose state or weights are rounded, by run id.
    """

    def __init__(
        self,
        runs: Sequence[FlatRun],
        keys: Callable[[FlatRun], Sequence[str]],
        ring: StagingRing | None,
        max_numel: int | None = None,
        ends: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._ring = ring
        self._masters = any(run.on_host is not None for run in runs)
        self.chunks: list[Chunk] = []
        for run in runs:
            numel = chunk_numel(run, keys(run), ring)
            numel = min(numel, max_numel) if max_numel else numel
            self.chunks += split_into_chunks(run, numel, (ends or {}).get(id(run), ()))
        rounded = [run for run in runs if run.rounds]
        self.positions = {id(run): ElementPositions.from_members(run.members, run.param.device) for run in rounded}
        self._positions = [chunk.positions(self.positions) for chunk in self.chunks]
        self._loads = StagedChunks(chunk.load(keys(chunk.run)) for chunk in self.chunks)
        self._prefetched: RingPass | None = None

    def prefetch_from_host(self) -> None:
        """Start to copy state for the next step, as far as the ring has space.

        Idempotent; the step need not follow.
        """
        if self._ring is not None and (self._prefetched is None or not self._prefetched.is_valid):
            self._prefetched = RingPass(self._ring, self._loads)
            self._prefetched.prefetch()

    @contextmanager
    def stream_state(self) -> Iterator[None]:
        """Surround :meth:`iter_chunks`, or the replay of a graph that captured it."""
        self.prefetch_from_host()
        ring_pass, self._prefetched = self._prefetched, None
        if ring_pass is not None:
            ring_pass.join()
        yield
        if ring_pass is not None:
            ring_pass.flush(range(len(self._loads)))
            if self._masters:  # the compute stream may read them from here on
                ring_pass.rejoin()

    def iter_chunks(self) -> Iterator[LoadedChunk]:
        """Yield each chunk with its state on the device.

        Writes to state and parameter are copied back before the next chunk is yielded.
        """
        ring_pass = InPlacePass(self._loads) if self._ring is None else RingPass(self._ring, self._loads)
        for number, chunk in enumerate(self.chunks):
            state, run = ring_pass.open(number), chunk.run
            param = state.pop(MASTER_SHARD) if run.on_host is not None else chunk.view_of(run.param)
            copy = None if run.copy is None else chunk.view_of(run.copy)
            yield LoadedChunk(chunk, param, copy, state, self._positions[number])
            ring_pass.close(number)
        ring_pass.rejoin()
