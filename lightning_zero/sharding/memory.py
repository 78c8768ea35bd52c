"""All memory that shards take, by what it is for (:class:`Role`).

===================  ========================================  ======================  ================================
role                 allocated                                 dtype                   given back
===================  ========================================  ======================  ================================
master shard         by ``place``, when the model is sharded;  the parameter's         with the engine; the memory
                     again by ``arrange``, for the optimizers;                         before, once another is placed
                     some on the host, see ``host_policy.py``
gradient             by ``allocate_gradients``, in the first   the parameter's, or     with the engine
                     training step that trains the parameter;  that of the copy
                     or it lies over the compute copy
deferred gradient    by ``allocate_deferred_gradients``, once  float32 or wider        with the engine, or once
                     gradients of micro-batches wait: whole,                           they wait elsewhere
                     or of host shards
compute copy         by ``allocate_compute_shards``, in the    the one that is         with the engine
                     first step of mixed precision             computed in
full-precision copy  likewise, for what autocast leaves as it  the parameter's         with the engine
                     is, where peers read copies; with
                     several hosts, of all that is not computed
                     in another dtype
resident weight      by ``cache_unsharded``, once the budget     as the weight is used   with the engine, or once
                     for it is known                                                   the budget is another
===================  ========================================  ======================  ================================

All but the last are shards: 1-D pieces, padding included, neighbours in one tensor for each dtype. With several hosts,
copies and deferred gradients are of host shards: of what ranks at one place of all hosts have together. Resident
weights are whole, as deferred gradients may be; where a host has one rank they are the host shards. Where
ranks copy each other's weights, master shards and copies lie in memory that peers read, and the executor is told where
those of other ranks lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import not_
from typing import Any

import torch
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.flat_buffer import FlatBuffer
from lightning_zero.sharding.grad_aliasing import alias_compute_shards
from lightning_zero.sharding.host_policy import HostMasterPolicy, HostMasters, stays_full_precision, compute_dtype_of
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.module_patching import UNSHARDED_CACHE
from lightning_zero.sharding.record import Records, Role, ShardedParameter
from lightning_zero.sharding.shard_sync import ShardSync
from lightning_zero.sharding.symm_mem import SymmetricMemory, PeerTransports
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["ShardMemory"]


class ShardMemory:
    """Allocates for the parameters of one engine, writes down on their records what it has given them, and tells the
    executor.

    Args:
        executor: where the parameters are registered.
        mesh: of the ranks.
        records: of the parameters; more may come.
        peers: where memory that other ranks reach comes from, if there is any.
        away: which master shards lie on the host; None: none.

    Attributes:
        shards: the arena of the master shards on the device, once the model is sharded.
        on_host: that of the others; None where there are none.
        gradients: that of the gradients of the parameters that were trained first, once they are.
        over_copies: gradients lie over compute copies, where there are any.
    """

    def __init__(
        self, executor: Executor, mesh: Mesh, records: Records, peers: PeerTransports | None = None, away: HostMasterPolicy | None = None
    ) -> None:
        self.executor = executor
        self._sync = ShardSync(executor)
        self._mesh = mesh
        self._records = records
        self._peers = peers
        self._masters = HostMasters(away) if away is not None else None
        self.shards: FlatBuffer | None = None
        self.on_host: FlatBuffer | None = None
        self.gradients: FlatBuffer | None = None
        self._unsettled = False  # shards are to be placed once more, whatever their order
        self._resident: FlatBuffer | None = None
        self._resident_for: tuple[torch.dtype | None, int, float] | None = None  # the arguments of cache_unsharded()
        self._defers_whole = False
        self.over_copies = False

    def holds(self, role: Role) -> list[Tensor]:
        """What has been allocated for ``role``, on this rank, in the order of registration."""
        return [record.memory[role] for record in self._records.live if role in record.memory]

    # -- master shards

    def place(self, order: Sequence[ShardedParameter]) -> None:
        """Moves the shards into an arena of their own, neighbours in this order. Collective."""
        goes = [self._masters is not None and self._masters.away.includes(record) for record in order]
        here, away = list(compress(order, map(not_, goes))), list(compress(order, goes))
        pieces = _pieces(here)
        everywhere = self._peers.allocate_shards(self.executor, FlatBuffer.sizes(pieces)) if self._peers else {}
        self._unsettled = self._peers is not None and self._peers.shards_wait
        self._sync.before_writing()
        arena = FlatBuffer(pieces, self._mesh.device, {dtype: mine for dtype, (mine, _) in everywhere.items()})
        for record, view in zip(here, arena.views, strict=True):
            self._move(record, view)
            if everywhere:
                self.executor.parameters.set_peer_shards(record.index, _parts(view, everywhere[view.dtype][1]))
        self.shards = arena
        if self._peers is not None:
            self._peers.shards_moved(everywhere)
        self._place_away(away)
        self._sync.after_writing()

    def _move(self, record: ShardedParameter, view: Tensor) -> None:
        view.copy_(record.shard)
        record.memory[Role.MASTER_SHARD] = view
        self.executor.parameters.move(record.index, view)
        record.install_shard()

    def _place_away(self, order: Sequence[ShardedParameter]) -> None:
        """Likewise into memory of the host."""
        if self._masters is None or not order:
            return
        for record in order:
            if record.is_on_host:  # another one comes where it is
                self._move(record, torch.empty_like(record.shard))
        pieces = _pieces(order)
        self._masters.allocate(FlatBuffer.sizes(pieces))
        self.on_host = FlatBuffer(pieces, self._mesh.device, self._masters.seen)
        for record, view in zip(order, self.on_host.views, strict=True):
            self._move(record, view)
            record.on_host = self._masters.on_host(view)
            self.executor.parameters.mark_on_host(record.index)

    def arrange(
        self, groups: Sequence[Sequence[Tensor]], kind: Callable[[ShardedParameter], Any] = lambda record: 0
    ) -> None:
        """Makes the shards of each group of parameters neighbours, so that an optimizer can step a group as one tensor;
        within a group, those of one ``kind``, which is sorted by. Nothing happens once training has begun."""
        if self._is_settled:
            return
        number = {id(param): n for n, group in enumerate(groups) for param in group}
        before = self._in_order()
        order = sorted(
            before,
            key=lambda record: (*_arena_of(record), number.get(id(record.param), len(groups)), kind(record)),
        )
        if [record.index for record in order] != [record.index for record in before]:
            self._unsettled = True
        self.settle(order)

    def settle(self, order: Sequence[ShardedParameter] | None = None) -> None:
        """Places shards for good, in this order or in that in which they are, where they are not so yet. Collective."""
        if self._unsettled:
            if self._peers is not None:
                self._peers.shards_settle()
            self.place(order or self._in_order())

    @property
    def may_leave(self) -> bool:
        """Whether shards can still be put on the host: nothing is laid out like them yet, and no rank reads another's.
        The same on every rank."""
        return self._masters is None and not self._is_settled and not self.executor.weights.uses_epoch_lock()

    def leave(self, away: HostMasterPolicy) -> None:
        """Those that ``away`` takes go to the host, and collectives move weights from now on. Collective.

        Raises:
            HostMemoryError: on every rank, where the host of one has no memory for them.
        """
        assert self.may_leave
        order, masters = self._in_order(), HostMasters(away)
        masters.allocate_together(FlatBuffer.sizes(_pieces(list(filter(away.includes, order)))), self._mesh)
        self._masters = masters
        if self._peers is not None:
            self._peers.shards_leave()
        self.place(order)

    @property
    def _is_settled(self) -> bool:
        """Whether training has begun, or there are no shards yet."""
        begun = any(set(record.memory) - {Role.MASTER_SHARD} for record in self._records)
        return self.shards is None or begun or self._resident is not None

    def _in_order(self) -> list[ShardedParameter]:
        return sorted(self._records.live, key=lambda record: (*_arena_of(record), record.shard.data_ptr()))

    # -- gradients

    def allocate_gradients(self) -> None:
        """Lays gradients out, in the shards' order, for the parameters that are trainable now; parameters that become
        trainable later get another arena. After copies were, where they lie over these. Harmless when repeated."""
        with no_shard_dispatch():
            new = [r for r in self._records.live if r.param.requires_grad and r.gradient is None]
        new = alias_compute_shards(self.executor, new) if self.over_copies else new
        if not new:
            return
        new.sort(key=lambda record: record.shard.data_ptr())
        arena = FlatBuffer([(record.layout, record.param.dtype) for record in new], self._mesh.device)
        for record, view in zip(new, arena.views, strict=True):
            self.executor.parameters.set_grad(record.index, view)
            record.memory[Role.GRADIENT] = view
        self.gradients = self.gradients or arena

    def allocate_deferred_gradients(self, whole: bool) -> None:
        """Memory in which gradients of micro-batches are added up before they are reduced, for what has a gradient now:
        ``whole``, or what the ranks of each host have reduced. Harmless when repeated; nothing may wait in memory of
        the other kind."""
        if whole != self._defers_whole:
            self.forget_deferred_gradients()
            self._defers_whole = whole
        new = [r for r in self._records.live if r.gradient is not None and Role.DEFERRED_GRADIENT not in r.memory]
        new.sort(key=lambda record: record.shard.data_ptr())
        wide = [torch.promote_types(record.param.dtype, torch.float32) for record in new]
        layouts = [_whole(record) if whole else self._on_host(record) for record in new]
        arena = FlatBuffer(list(zip(layouts, wide, strict=True)), self._mesh.device)
        for record, view in zip(new, arena.views, strict=True):
            record.memory[Role.DEFERRED_GRADIENT] = view
            self.executor.parameters.set_deferred_gradient(record.index, view, whole)

    def forget_deferred_gradients(self) -> None:
        """Gives that memory back. Harmless where there is none."""
        for record in self._records:
            if record.memory.pop(Role.DEFERRED_GRADIENT, None) is not None:
                self.executor.parameters.set_deferred_gradient(record.index, None, False)

    # -- copies

    def allocate_compute_shards(self, dtype: torch.dtype, peers: SymmetricMemory | None = None) -> None:
        """Memory for all wider floating point shards in ``dtype``, laid out like the shards; such that all ranks can
        read it, if ``peers`` is given, with full-precision copies where they are needed. Harmless when repeated.
        Collective."""
        if self.shards is None or self.holds(Role.COMPUTE_SHARD):
            return
        wide = [t for t in self.shards.flat.values() if compute_dtype_of(t.dtype, dtype) != t.dtype]
        away = list(self.on_host.flat.values()) if self.on_host is not None else []
        copies: dict[tuple[bool, str], tuple[Tensor, list[Tensor]]] = {}
        for is_on_host, masters in chain(((False, t) for t in wide), ((True, t) for t in away)):
            if peers is not None:
                copies[is_on_host, str(masters.dtype)] = peers.empty(masters.numel(), dtype)
            else:
                copies[is_on_host, str(masters.dtype)] = torch.empty_like(masters, dtype=dtype), []
        copied = [record for record in self._records.live if _arena_of(record) in copies]
        full_precision = (
            _full_precision(copied, peers) if peers is not None and not self.executor.weights.uses_epoch_lock() else []
        )
        # Made known only now that there is memory for all: half of it would be worse than none.
        for masters in wide:
            self.executor.parameters.add_compute_shard_memory(copies[False, str(masters.dtype)][0], masters)
        for record in copied:
            copy, all_ranks = copies[_arena_of(record)]
            [record.memory[Role.COMPUTE_SHARD]] = _parts(record.shard, [copy])
            self.executor.parameters.set_compute_shard(record.index, record.memory[Role.COMPUTE_SHARD])
            if all_ranks:
                self.executor.parameters.set_peer_compute_shards(record.index, _parts(record.shard, all_ranks))
        for record, mine, theirs in full_precision:
            record.memory[Role.FULL_PRECISION_SHARD] = mine
            self.executor.parameters.set_full_precision_shard(record.index, mine, theirs)
        self._sync.before_writing()  # what is to be read first must be written

    def allocate_host_shards(self, dtype: torch.dtype | None, peers: SymmetricMemory | None = None) -> None:
        """Where hosts exchange weights: memory for host shards in the dtypes in which compiled code reads them;
        ``dtype``, if wider ones are computed in it. In memory that the ranks of a host can read, if ``peers`` is given.
        Harmless when repeated. Collective."""
        if self.holds(Role.COMPUTE_SHARD) or self.holds(Role.FULL_PRECISION_SHARD):
            return
        wanted: list[tuple[ShardedParameter, Role, torch.dtype]] = []
        for record in self._records.live:
            own, used = record.param.dtype, compute_dtype_of(record.param.dtype, dtype)
            if used != own:
                wanted.append((record, Role.COMPUTE_SHARD, used))
            if used == own or stays_full_precision(record):
                wanted.append((record, Role.FULL_PRECISION_SHARD, own))
        pieces = [(self._on_host(record), kind) for record, _, kind in wanted]
        sizes = FlatBuffer.sizes(pieces) if peers is not None else {}
        everywhere = {kind: peers.empty(size, kind) for kind, size in sizes.items()} if peers is not None else {}
        arena = FlatBuffer(pieces, self._mesh.device, {kind: mine for kind, (mine, _) in everywhere.items()})
        for (record, role, kind), view in zip(wanted, arena.views, strict=True):  # now that there is memory for all
            record.memory[role] = view
            theirs = _parts(view, everywhere[kind][1]) if everywhere else []
            if role is Role.FULL_PRECISION_SHARD:
                self.executor.parameters.set_full_precision_shard(record.index, view, theirs)
                continue
            self.executor.parameters.set_compute_shard(record.index, view)
            if theirs:
                self.executor.parameters.set_peer_compute_shards(record.index, theirs)
        self._sync.before_writing()  # what is to be read first must be written

    def _on_host(self, record: ShardedParameter) -> ShardLayout:
        """How the parameter is cut among the ranks of a host."""
        layout, hosts = record.layout, self._mesh.shard_host_count
        return replace(layout, shard_numel=hosts * layout.shard_numel, world_size=layout.world_size // hosts)

    # -- resident weights

    def cache_unsharded(self, dtype: torch.dtype | None, small_bytes: int, budget_bytes: float) -> None:
        """Memory for whole parameters, in which they stay until the optimizer steps; their modules are shown it. With
        other arguments than before: another one, in place of that. Harmless when repeated.

        Args:
            dtype: that floating point parameters of a wider one are used in, unless autocast leaves them as they are;
                None for their own.
            small_bytes: parameters of at most this size are left out, unless there is memory for all.
            budget_bytes: for all together; one that does not fit is skipped.
        """
        wanted = dtype, small_bytes, budget_bytes
        if wanted == self._resident_for or (self._resident_for is None and not budget_bytes):
            return
        self._resident_for = wanted
        self._forget_resident()
        if not budget_bytes:
            return
        if math.isinf(budget_bytes):
            small_bytes = 0
        found: list[tuple[ShardedParameter, ShardLayout, torch.dtype]] = []
        for record in self._records.live:
            whole, used = _whole(record), _dtype_of(record, dtype)
            size = whole.shard_numel * used.itemsize
            if record.layout.numel * used.itemsize > small_bytes and size <= budget_bytes:
                budget_bytes -= size
                found.append((record, whole, used))
        there = [self._whole_on_host(record, used) for record, _, used in found]
        made = [(whole, used) for (_, whole, used), flat in zip(found, there, strict=True) if flat is None]
        self._resident = FlatBuffer(made, self._mesh.device)
        new = iter(self._resident.views)
        for (record, whole, _), flat in zip(found, (next(new) if t is None else t for t in there), strict=True):
            self.executor.parameters.set_resident(record.index, flat)
            record.memory[Role.UNSHARDED_CACHE] = view = flat[: whole.numel].view(whole.shape)
            for owner, key in record.owners:
                owner.__dict__.setdefault(UNSHARDED_CACHE, {})[key] = view

    def _whole_on_host(self, record: ShardedParameter, dtype: torch.dtype) -> Tensor | None:
        """The host shard in ``dtype``, where that is all of the parameter: no other memory is needed then."""
        role = Role.FULL_PRECISION_SHARD if dtype == record.param.dtype else Role.COMPUTE_SHARD
        copy = record.memory.get(role)
        whole = self._mesh.inter_host_shard_group is not None and self._mesh.intra_host.size == 1
        return copy if whole and copy is not None and copy.dtype == dtype else None

    def unsharded_bytes(self, dtype: torch.dtype | None) -> int:
        """Of all parameters, whole and with their padding; ``dtype``: likewise."""
        return sum(_whole(record).shard_numel * _dtype_of(record, dtype).itemsize for record in self._records.live)

    def _forget_resident(self) -> None:
        self._resident = None
        for record in self._records:
            if record.memory.pop(Role.UNSHARDED_CACHE, None) is not None:
                self.executor.parameters.set_resident(record.index, None)
                for owner, key in record.owners:
                    owner.__dict__[UNSHARDED_CACHE].pop(key, None)


def _whole(record: ShardedParameter) -> ShardLayout:
    """All of the parameter and its padding, as compiled code reads it."""
    layout = record.layout
    return ShardLayout(layout.memory_shape, layout.shard_numel * layout.world_size, 1)


def _pieces(order: Sequence[ShardedParameter]) -> list[tuple[ShardLayout, torch.dtype]]:
    return [(record.layout, record.param.dtype) for record in order]


def _arena_of(record: ShardedParameter) -> tuple[bool, str]:
    """In which of the arenas' tensors its shard lies."""
    return record.is_on_host, str(record.param.dtype)


def _parts(shard: Tensor, memory: Sequence[Tensor]) -> list[Tensor]:
    """Of each of these, laid out like the arena that ``shard`` is a piece of, the same piece."""
    begin = shard.storage_offset()
    return [tensor[begin : begin + shard.numel()] for tensor in memory]


def _dtype_of(record: ShardedParameter, dtype: torch.dtype | None) -> torch.dtype:
    """The same, for one that may stay as it is."""
    own: torch.dtype = record.param.dtype
    return own if stays_full_precision(record) else compute_dtype_of(own, dtype)


def _full_precision(
    copied: Sequence[ShardedParameter], peers: SymmetricMemory
) -> list[tuple[ShardedParameter, Tensor, list[Tensor]]]:
    """Autocast leaves norms and embeddings in full precision, so their compute copies are not what is gathered. For
    each: memory on this rank, and on each."""
    by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
    for record in copied:
        if stays_full_precision(record):
            by_dtype.setdefault(record.param.dtype, []).append(record)
    found = []
    for dtype, records in by_dtype.items():
        sizes = [record.layout.shard_numel for record in records]
        mine, all_ranks = peers.empty(sum(sizes), dtype)
        pieces = zip(mine.split(sizes), *(memory.split(sizes) for memory in all_ranks), strict=True)
        found += [(record, own, list(theirs)) for record, (own, *theirs) in zip(records, pieces, strict=True)]
    return found
