"""Flat memory that shards, or their gradients, are views of: one contiguous tensor per dtype.

---

Master shards in the host's memory: which, and where it comes from.

A shard can lie there if compiled code reads its compute copy in its place. A device reads and writes it over its link
all the same, slowly, as a tensor like any other, so whatever looks at shards need not know where they are; only what
passes over all of them at each step does, and copies.


---

Gradients that lie where the compute copies of their weights lay: see csrc/alias_gradients.h.

---

All memory that shards take, by what it is for (:class:`Role`).

===================  ========================================  ======================  ================================
role                 allocated                                 dtype                   given back
===================  ========================================  ======================  ================================
master shard         by ``place_shards``, when the model is sharded;  the parameter's         with the engine; the memory
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import not_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import HostMemoryError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.module_patching import UNSHARDED_CACHE
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.symm_mem import PeerTransports, SymmetricMemory
from lightning_zero.sharding.weight_reader import ShardSync

__all__ = [
    "FlatBuffer",
    "HostMasterPolicy",
    "HostMasters",
    "ShardMemory",
    "alias_compute_shards",
    "can_be_on_host",
    "check_single_micro_batch",
    "compute_dtype_of",
    "free_gradients",
    "stays_full_precision",
]


class FlatBuffer:
    """One zeroed tensor per dtype, cut into 1-D pieces in the order given.

    Args:
        pieces: layout and dtype of each piece; neighbours of one dtype are neighbours in memory.
        device: where.
        memory: zeros of the right sizes (:meth:`sizes`), if they are to lie somewhere else.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[ShardLayout, torch.dtype]],
        device: torch.device,
        memory: dict[torch.dtype, Tensor] | None = None,
    ) -> None:
        totals = self.sizes(pieces)
        self.flat: dict[torch.dtype, Tensor] = memory or {
            dtype: torch.zeros(total, dtype=dtype, device=device) for dtype, total in totals.items()
        }
        self.views: list[Tensor] = []
        offsets = dict.fromkeys(totals, 0)
        for layout, dtype in pieces:
            begin = offsets[dtype]
            offsets[dtype] = begin + layout.shard_numel
            self.views.append(self.flat[dtype][begin : offsets[dtype]])

    @staticmethod
    def sizes(pieces: Sequence[tuple[ShardLayout, torch.dtype]]) -> dict[torch.dtype, int]:
        """Elements of each dtype."""
        totals: dict[torch.dtype, int] = {}
        for layout, dtype in pieces:
            totals[dtype] = totals.get(dtype, 0) + layout.shard_numel
        return totals

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat.values())

    def __repr__(self) -> str:
        parts = ", ".join(f"{dtype}: {tensor.numel():,}" for dtype, tensor in self.flat.items())
        return f"Arena({parts}; {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class HostMasterPolicy:
    """What lies on the host.

    Attributes:
        dtype: that is computed in.
        allocate: zeros of so many elements: as the device sees them, and as the host does.
    """

    dtype: torch.dtype
    allocate: Callable[[int, torch.dtype], tuple[Tensor, Tensor]]

    def includes(self, record: ShardedParameter) -> bool:
        """Whether the parameter's master shard lies there."""
        return can_be_on_host(record, self.dtype)


class HostMasters:
    """Their memory, which is allocated once: that takes long, and there may be no more.

    Attributes:
        away: which lie there.
        seen: by dtype, as the device sees it.
    """

    def __init__(self, policy: HostMasterPolicy) -> None:
        self.policy = policy
        self.device_tensors: dict[torch.dtype, Tensor] = {}
        self._host_tensors: dict[torch.dtype, Tensor] = {}  # the same, as the host sees it

    def allocate(self, sizes: dict[torch.dtype, int]) -> None:
        """So many elements by dtype, zeros where it is not there yet.

        Raises:
            HostMemoryError: the host has not so much.
        """
        if {dtype: tensor.numel() for dtype, tensor in self.device_tensors.items()} != sizes:
            both = {dtype: self.policy.allocate(size, dtype) for dtype, size in sizes.items()}
            self.device_tensors = {dtype: device_tensors for dtype, (device_tensors, _) in both.items()}
            self._host_tensors = {dtype: own for dtype, (_, own) in both.items()}

    def allocate_together(self, sizes: dict[torch.dtype, int], mesh: Mesh) -> None:
        """Likewise on every rank, since a plan wants it: no rank may wait for one that has failed. Collective.

        Raises:
            HostMemoryError: on every rank, where the host of one has not so much.
        """
        error = None
        try:
            self.allocate(sizes)
        except HostMemoryError as failure:
            error = str(failure)
        if (first := mesh.first_rank_error(error)) is not None:
            raise HostMemoryError(
                "Nothing but master weights on the host would hold memory=. Pass offload=('optimizer',) to keep them, "
                "with less in a batch, or, on rank {}: {}".format(*first)
            )

    def on_host(self, shard: Tensor) -> Tensor:
        """A piece of what the device sees, as the host does."""
        begin = shard.storage_offset()
        return self._host_tensors[shard.dtype][begin : begin + shard.numel()]


def can_be_on_host(record: ShardedParameter, dtype: torch.dtype | None) -> bool:
    """Whether a parameter's master shard can lie on the host where compiled code computes in ``dtype``."""
    own = record.param.dtype
    return compute_dtype_of(own, dtype) != own and not stays_full_precision(record)


def compute_dtype_of(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype compiled code uses a parameter of its ``own``, where wider floating point ones are computed in
    ``dtype``."""
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > dtype.itemsize else own


def stays_full_precision(record: ShardedParameter) -> bool:
    """Whether autocast leaves the parameter in full precision, as norms and embeddings."""
    return len(record.layout.shape) < 2 or any(isinstance(owner, nn.Embedding) for owner, _ in record.owners)


def alias_compute_shards(executor: Executor, trained: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Gives the gradients of these parameters their copies' memory; returns the parameters that have no copy."""
    others = []
    for record in trained:
        copy = record.memory.get(Role.COMPUTE_SHARD)
        if copy is None:
            others.append(record)
            continue
        executor.parameters.set_grad(record.index, copy)
        record.memory[Role.GRADIENT] = copy
        with no_shard_dispatch():
            record.param.grad_dtype = None  # any: otherwise torch takes those of the parameter's own alone
    return others


def free_gradients(executor: Executor, records: Iterable[ShardedParameter]) -> None:
    """Between steps, when nobody wants the values: takes away all memory that gradients have."""
    for record in records:
        if record.gradient is None:
            continue
        with no_shard_dispatch():
            record.param.grad = record.visible_grad = None
            if record.grad_aliases_compute_shard:
                record.param.grad_dtype = record.param.dtype
        del record.memory[Role.GRADIENT]
        executor.parameters.set_grad(record.index, None)


def check_single_micro_batch(alias_gradients: bool) -> None:
    """Where gradients lie over copies, another micro-batch comes before the step."""
    if alias_gradients:
        raise UnsupportedError(
            "grad_aliasing=True is for steps of one micro-batch: the gradients of the first would lie where "
            "the next one's weights are. Leave the option out, or train without accumulate_grad_batches; where "
            "memory=... has chosen it, pass tuning=Tuning(grad_aliasing=False)."
        )


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
        alias_gradients: gradients lie over compute copies, where there are any.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        records: Records,
        peers: PeerTransports | None = None,
        policy: HostMasterPolicy | None = None,
    ) -> None:
        self.executor = executor
        self._sync = ShardSync(executor)
        self._mesh = mesh
        self._records = records
        self._peers = peers
        self._host_masters = HostMasters(policy) if policy is not None else None
        self.shards: FlatBuffer | None = None
        self.on_host: FlatBuffer | None = None
        self.gradients: FlatBuffer | None = None
        self._must_place_again = False  # shards are to be placed once more, whatever their order
        self._unsharded: FlatBuffer | None = None
        self._unsharded_args: tuple[torch.dtype | None, int, float] | None = None  # the arguments of cache_unsharded()
        self._deferred_are_full = False
        self.alias_gradients = False

    def holds(self, role: Role) -> list[Tensor]:
        """What has been allocated for ``role``, on this rank, in the order of registration."""
        return [record.memory[role] for record in self._records.live if role in record.memory]

    # -- master shards

    def place_shards(self, order: Sequence[ShardedParameter]) -> None:
        """Moves the shards into an arena of their own, neighbours in this order. Collective."""
        goes = [self._host_masters is not None and self._host_masters.policy.includes(record) for record in order]
        here, policy = list(compress(order, map(not_, goes))), list(compress(order, goes))
        pieces = _layouts_and_dtypes(here)
        peer_memory = self._peers.allocate_shards(self.executor, FlatBuffer.sizes(pieces)) if self._peers else {}
        self._must_place_again = self._peers is not None and self._peers.placement_is_pending
        self._sync.before_writing()
        buffer = FlatBuffer(pieces, self._mesh.device, {dtype: mine for dtype, (mine, _) in peer_memory.items()})
        for record, view in zip(here, buffer.views, strict=True):
            self._move(record, view)
            if peer_memory:
                self.executor.parameters.set_peer_shards(record.index, _same_slices(view, peer_memory[view.dtype][1]))
        self.shards = buffer
        if self._peers is not None:
            self._peers.set_shard_memory(peer_memory)
        self._place_on_host(policy)
        self._sync.after_writing()

    def _move(self, record: ShardedParameter, view: Tensor) -> None:
        view.copy_(record.shard)
        record.memory[Role.MASTER_SHARD] = view
        self.executor.parameters.move(record.index, view)
        record.install_shard()

    def _place_on_host(self, order: Sequence[ShardedParameter]) -> None:
        """Likewise into memory of the host."""
        if self._host_masters is None or not order:
            return
        for record in order:
            if record.is_on_host:  # another one comes where it is
                self._move(record, torch.empty_like(record.shard))
        pieces = _layouts_and_dtypes(order)
        self._host_masters.allocate(FlatBuffer.sizes(pieces))
        self.on_host = FlatBuffer(pieces, self._mesh.device, self._host_masters.device_tensors)
        for record, view in zip(order, self.on_host.views, strict=True):
            self._move(record, view)
            record.on_host = self._host_masters.on_host(view)
            self.executor.parameters.mark_on_host(record.index)

    def arrange(
        self, groups: Sequence[Sequence[Tensor]], kind: Callable[[ShardedParameter], Any] = lambda record: 0
    ) -> None:
        """Makes the shards of each group of parameters neighbours, so that an optimizer can step a group as one tensor;
        within a group, those of one ``kind``, which is sorted by. Nothing happens once training has begun."""
        if self._is_final:
            return
        number = {id(param): n for n, group in enumerate(groups) for param in group}
        before = self._in_memory_order()
        order = sorted(
            before,
            key=lambda record: (*_buffer_key(record), number.get(id(record.param), len(groups)), kind(record)),
        )
        if [record.index for record in order] != [record.index for record in before]:
            self._must_place_again = True
        self.settle(order)

    def settle(self, order: Sequence[ShardedParameter] | None = None) -> None:
        """Places shards for good, in this order or in that in which they are, where they are not so yet. Collective."""
        if self._must_place_again:
            if self._peers is not None:
                self._peers.finalize_placement()
            self.place_shards(order or self._in_memory_order())

    @property
    def may_leave(self) -> bool:
        """Whether shards can still be put on the host: nothing is laid out like them yet, and no rank reads another's.
        The same on every rank."""
        return self._host_masters is None and not self._is_final and not self.executor.weights.uses_epoch_lock()

    def leave(self, policy: HostMasterPolicy) -> None:
        """Those that ``policy`` takes go to the host, and collectives move weights from now on. Collective.

        Raises:
            HostMemoryError: on every rank, where the host of one has no memory for them.
        """
        assert self.may_leave
        order, masters = self._in_memory_order(), HostMasters(policy)
        masters.allocate_together(
            FlatBuffer.sizes(_layouts_and_dtypes(list(filter(policy.includes, order)))), self._mesh
        )
        self._host_masters = masters
        if self._peers is not None:
            self._peers.move_shards_to_host()
        self.place_shards(order)

    @property
    def _is_final(self) -> bool:
        """Whether training has begun, or there are no shards yet."""
        begun = any(set(record.memory) - {Role.MASTER_SHARD} for record in self._records)
        return self.shards is None or begun or self._unsharded is not None

    def _in_memory_order(self) -> list[ShardedParameter]:
        return sorted(self._records.live, key=lambda record: (*_buffer_key(record), record.shard.data_ptr()))

    # -- gradients

    def allocate_gradients(self) -> None:
        """Lays gradients out, in the shards' order, for the parameters that are trainable now; parameters that become
        trainable later get another arena. After copies were, where they lie over these. Harmless when repeated."""
        with no_shard_dispatch():
            new = [r for r in self._records.live if r.param.requires_grad and r.gradient is None]
        new = alias_compute_shards(self.executor, new) if self.alias_gradients else new
        if not new:
            return
        new.sort(key=lambda record: record.shard.data_ptr())
        buffer = FlatBuffer([(record.layout, record.param.dtype) for record in new], self._mesh.device)
        for record, view in zip(new, buffer.views, strict=True):
            self.executor.parameters.set_grad(record.index, view)
            record.memory[Role.GRADIENT] = view
        self.gradients = self.gradients or buffer

    def allocate_deferred_gradients(self, whole: bool) -> None:
        """Memory in which gradients of micro-batches are added up before they are reduced, for what has a gradient now:
        ``whole``, or what the ranks of each host have reduced. Harmless when repeated; nothing may wait in memory of
        the other kind."""
        if whole != self._deferred_are_full:
            self.free_deferred_gradients()
            self._deferred_are_full = whole
        new = [r for r in self._records.live if r.gradient is not None and Role.DEFERRED_GRADIENT not in r.memory]
        new.sort(key=lambda record: record.shard.data_ptr())
        wide = [torch.promote_types(record.param.dtype, torch.float32) for record in new]
        layouts = [_full_layout(record) if whole else self._host_layout(record) for record in new]
        buffer = FlatBuffer(list(zip(layouts, wide, strict=True)), self._mesh.device)
        for record, view in zip(new, buffer.views, strict=True):
            record.memory[Role.DEFERRED_GRADIENT] = view
            self.executor.parameters.set_deferred_gradient(record.index, view, whole)

    def free_deferred_gradients(self) -> None:
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
        policy = list(self.on_host.flat.values()) if self.on_host is not None else []
        copies: dict[tuple[bool, str], tuple[Tensor, list[Tensor]]] = {}
        for is_on_host, masters in chain(((False, t) for t in wide), ((True, t) for t in policy)):
            if peers is not None:
                copies[is_on_host, str(masters.dtype)] = peers.empty(masters.numel(), dtype)
            else:
                copies[is_on_host, str(masters.dtype)] = torch.empty_like(masters, dtype=dtype), []
        copied = [record for record in self._records.live if _buffer_key(record) in copies]
        full_precision = (
            _allocate_full_precision(copied, peers)
            if peers is not None and not self.executor.weights.uses_epoch_lock()
            else []
        )
        # Made known only now that there is memory for all: half of it would be worse than none.
        for masters in wide:
            self.executor.parameters.add_compute_shard_memory(copies[False, str(masters.dtype)][0], masters)
        for record in copied:
            copy, all_ranks = copies[_buffer_key(record)]
            [record.memory[Role.COMPUTE_SHARD]] = _same_slices(record.shard, [copy])
            self.executor.parameters.set_compute_shard(record.index, record.memory[Role.COMPUTE_SHARD])
            if all_ranks:
                self.executor.parameters.set_peer_compute_shards(record.index, _same_slices(record.shard, all_ranks))
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
        pieces = [(self._host_layout(record), kind) for record, _, kind in wanted]
        sizes = FlatBuffer.sizes(pieces) if peers is not None else {}
        peer_memory = {kind: peers.empty(size, kind) for kind, size in sizes.items()} if peers is not None else {}
        buffer = FlatBuffer(pieces, self._mesh.device, {kind: mine for kind, (mine, _) in peer_memory.items()})
        for (record, role, kind), view in zip(wanted, buffer.views, strict=True):  # now that there is memory for all
            record.memory[role] = view
            theirs = _same_slices(view, peer_memory[kind][1]) if peer_memory else []
            if role is Role.FULL_PRECISION_SHARD:
                self.executor.parameters.set_full_precision_shard(record.index, view, theirs)
                continue
            self.executor.parameters.set_compute_shard(record.index, view)
            if theirs:
                self.executor.parameters.set_peer_compute_shards(record.index, theirs)
        self._sync.before_writing()  # what is to be read first must be written

    def _host_layout(self, record: ShardedParameter) -> ShardLayout:
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
        if wanted == self._unsharded_args or (self._unsharded_args is None and not budget_bytes):
            return
        self._unsharded_args = wanted
        self._free_unsharded()
        if not budget_bytes:
            return
        if math.isinf(budget_bytes):
            small_bytes = 0
        found: list[tuple[ShardedParameter, ShardLayout, torch.dtype]] = []
        for record in self._records.live:
            whole, used = _full_layout(record), _use_dtype(record, dtype)
            size = whole.shard_numel * used.itemsize
            if record.layout.numel * used.itemsize > small_bytes and size <= budget_bytes:
                budget_bytes -= size
                found.append((record, whole, used))
        there = [self._existing_full_copy(record, used) for record, _, used in found]
        made = [(whole, used) for (_, whole, used), flat in zip(found, there, strict=True) if flat is None]
        self._unsharded = FlatBuffer(made, self._mesh.device)
        new = iter(self._unsharded.views)
        for (record, whole, _), flat in zip(found, (next(new) if t is None else t for t in there), strict=True):
            self.executor.parameters.set_resident(record.index, flat)
            record.memory[Role.UNSHARDED_CACHE] = view = flat[: whole.numel].view(whole.shape)
            for owner, key in record.owners:
                owner.__dict__.setdefault(UNSHARDED_CACHE, {})[key] = view

    def _existing_full_copy(self, record: ShardedParameter, dtype: torch.dtype) -> Tensor | None:
        """The host shard in ``dtype``, where that is all of the parameter: no other memory is needed then."""
        role = Role.FULL_PRECISION_SHARD if dtype == record.param.dtype else Role.COMPUTE_SHARD
        copy = record.memory.get(role)
        whole = self._mesh.inter_host_shard_group is not None and self._mesh.intra_host.size == 1
        return copy if whole and copy is not None and copy.dtype == dtype else None

    def unsharded_bytes(self, dtype: torch.dtype | None) -> int:
        """Of all parameters, whole and with their padding; ``dtype``: likewise."""
        return sum(
            _full_layout(record).shard_numel * _use_dtype(record, dtype).itemsize for record in self._records.live
        )

    def _free_unsharded(self) -> None:
        self._unsharded = None
        for record in self._records:
            if record.memory.pop(Role.UNSHARDED_CACHE, None) is not None:
                self.executor.parameters.set_resident(record.index, None)
                for owner, key in record.owners:
                    owner.__dict__[UNSHARDED_CACHE].pop(key, None)


def _full_layout(record: ShardedParameter) -> ShardLayout:
    """All of the parameter and its padding, as compiled code reads it."""
    layout = record.layout
    return ShardLayout(layout.memory_shape, layout.shard_numel * layout.world_size, 1)


def _layouts_and_dtypes(order: Sequence[ShardedParameter]) -> list[tuple[ShardLayout, torch.dtype]]:
    return [(record.layout, record.param.dtype) for record in order]


def _buffer_key(record: ShardedParameter) -> tuple[bool, str]:
    """In which of the arenas' tensors its shard lies."""
    return record.is_on_host, str(record.param.dtype)


def _same_slices(shard: Tensor, memory: Sequence[Tensor]) -> list[Tensor]:
    """Of each of these, laid out like the arena that ``shard`` is a piece of, the same piece."""
    begin = shard.storage_offset()
    return [tensor[begin : begin + shard.numel()] for tensor in memory]


def _use_dtype(record: ShardedParameter, dtype: torch.dtype | None) -> torch.dtype:
    """The same, for one that may stay as it is."""
    own: torch.dtype = record.param.dtype
    return own if stays_full_precision(record) else compute_dtype_of(own, dtype)


def _allocate_full_precision(
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
