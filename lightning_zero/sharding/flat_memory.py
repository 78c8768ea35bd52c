"""Allocate all memory that sharded parameters take, by role (:class:`Role`).

All roles but the unsharded cache are 1-D slices of one tensor per dtype, padding included. With several hosts, compute
shards and deferred gradients may be host shards: one per rank of a host. If ranks copy each other's weights, master
and compute shards are in symmetric memory. Memory is freed with the engine, unless :class:`Role` tells otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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


class FlatBuffer:
    """Hold one zeroed tensor per dtype, split into 1-D views in the order of ``pieces``.

    ``memory`` replaces the tensors by existing zeros of the sizes of :meth:`sizes`.
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
        """Return the number of elements of each dtype."""
        totals: dict[torch.dtype, int] = {}
        for layout, dtype in pieces:
            totals[dtype] = totals.get(dtype, 0) + layout.shard_numel
        return totals

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat.values())

    def __repr__(self) -> str:
        parts = ", ".join(f"{dtype}: {tensor.numel():,}" for dtype, tensor in self.flat.items())
        return f"FlatBuffer({parts}; {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class HostMasterPolicy:
    """Decide which master shards are stored in host memory.

    Compiled code must read the compute shard instead. The device reads and writes host memory over its link like any
    other tensor, only slowly. So most code need not know where a shard is; only loops over all shards stage copies.

    Attributes:
        allocate: returns zeros of a number of elements twice: as a tensor of the device, and as one of the CPU.
    """

    dtype: torch.dtype
    allocate: Callable[[int, torch.dtype], tuple[Tensor, Tensor]]

    def includes(self, record: ShardedParameter) -> bool:
        """Return True if the parameter's master shard is stored on the host."""
        return can_be_on_host(record, self.dtype)


class HostMasters:
    """Hold the memory of master shards on the host. It is allocated once, because pinning is slow."""

    def __init__(self, policy: HostMasterPolicy) -> None:
        self.policy = policy
        self.device_tensors: dict[torch.dtype, Tensor] = {}
        self._host_tensors: dict[torch.dtype, Tensor] = {}  # the same memory, as CPU tensors

    def allocate(self, sizes: dict[torch.dtype, int]) -> None:
        """Allocate zeros of these numbers of elements by dtype, unless that is done already."""
        if {dtype: tensor.numel() for dtype, tensor in self.device_tensors.items()} != sizes:
            both = {dtype: self.policy.allocate(size, dtype) for dtype, size in sizes.items()}
            self.device_tensors = {dtype: device for dtype, (device, _) in both.items()}
            self._host_tensors = {dtype: host for dtype, (_, host) in both.items()}

    def allocate_together(self, sizes: dict[torch.dtype, int], mesh: Mesh) -> None:
        """Call :meth:`allocate` on every rank; raise HostMemoryError on all if one host has too little memory.
        Collective.
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
        """Return the CPU tensor of the same memory as ``shard``, a slice of a tensor of the device."""
        begin = shard.storage_offset()
        return self._host_tensors[shard.dtype][begin : begin + shard.numel()]


def can_be_on_host(record: ShardedParameter, dtype: torch.dtype | None) -> bool:
    """Return True if a parameter's master shard can be on the host, given the compute dtype."""
    own = record.param.dtype
    return compute_dtype_of(own, dtype) != own and not stays_full_precision(record)


def compute_dtype_of(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which compiled code uses a parameter of dtype ``own``.

    That is ``dtype`` for wider floating-point parameters, and ``own`` for others.
    """
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > dtype.itemsize else own


def stays_full_precision(record: ShardedParameter) -> bool:
    """Return True if autocast leaves the parameter in full precision, as norms and embeddings."""
    return len(record.layout.shape) < 2 or any(isinstance(owner, nn.Embedding) for owner, _ in record.owners)


def alias_compute_shards(executor: Executor, trained: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Store the gradients of these parameters in the memory of their compute shards.

    The executor decides when a gradient may be written there.

    Returns:
        The parameters without a compute shard.
    """
    others = []
    for record in trained:
        copy = record.memory.get(Role.COMPUTE_SHARD)
        if copy is None:
            others.append(record)
            continue
        executor.parameters.set_grad(record.index, copy)
        record.memory[Role.GRADIENT] = copy
        with no_shard_dispatch():
            record.param.grad_dtype = None  # allow any dtype: torch requires the parameter's by default
    return others


def free_gradients(executor: Executor, records: Iterable[ShardedParameter]) -> None:
    """Free all memory of gradients. Call it between steps, when the values are not needed."""
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
    """Raise if another micro-batch follows before the step while gradients alias the compute shards."""
    if alias_gradients:
        raise UnsupportedError(
            "grad_aliasing=True is for steps of one micro-batch: gradients of the first would overwrite weights of the "
            "next. Leave the option out, or train without accumulate_grad_batches; if memory=... has chosen it, pass "
            "tuning=Tuning(grad_aliasing=False)."
        )


class ShardMemory:
    """Allocate memory for the parameters of one engine, and set it in their records and the executor.

    Args:
        transports: allocate memory that other ranks reach; None: there is none.
        policy: which master shards are on the host; None: none.
        alias_gradients: gradients alias the compute shards, if there are any.

    Attributes:
        shards: buffer of the master shards on the device, after the model is sharded.
        on_host: buffer of the master shards on the host, or None.
        gradients: buffer of the gradients that were allocated first.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        records: Records,
        transports: PeerTransports | None = None,
        policy: HostMasterPolicy | None = None,
        alias_gradients: bool = False,
    ) -> None:
        self.executor = executor
        self._sync = ShardSync(executor)
        self._mesh = mesh
        self._records = records
        self._transports = transports
        self._host_masters = HostMasters(policy) if policy is not None else None
        self.shards: FlatBuffer | None = None
        self.on_host: FlatBuffer | None = None
        self.gradients: FlatBuffer | None = None
        self._must_place_again = False  # even if the order of shards stays the same
        self._unsharded: FlatBuffer | None = None
        self._unsharded_args: tuple[torch.dtype | None, int, float] | None = None  # the arguments of cache_unsharded()
        self._deferred_are_full = False
        self.alias_gradients = alias_gradients

    def tensors(self, role: Role) -> list[Tensor]:
        """Return this rank's memory of ``role``, in the order of registration."""
        return [record.memory[role] for record in self._records.live if role in record.memory]

    # -- master shards

    def place_shards(self, order: Sequence[ShardedParameter]) -> None:
        """Move the shards into a new flat buffer, contiguous in this order. Collective."""
        policy = self._host_masters.policy if self._host_masters is not None else None
        on_host = [record for record in order if policy is not None and policy.includes(record)]
        on_device = [record for record in order if policy is None or not policy.includes(record)]
        pieces = _layouts_and_dtypes(on_device)
        peer_memory = (
            self._transports.allocate_shards(self.executor, FlatBuffer.sizes(pieces)) if self._transports else {}
        )
        self._must_place_again = self._transports is not None and self._transports.placement_is_pending
        self._sync.before_writing()
        buffer = FlatBuffer(pieces, self._mesh.device, {dtype: mine for dtype, (mine, _) in peer_memory.items()})
        for record, view in zip(on_device, buffer.views, strict=True):
            self._move(record, view)
            if peer_memory:
                self.executor.parameters.set_peer_shards(record.index, _same_slices(view, peer_memory[view.dtype][1]))
        self.shards = buffer
        if self._transports is not None:
            self._transports.set_shard_memory(peer_memory)
        self._place_on_host(on_host)
        self._sync.after_writing()

    def _move(self, record: ShardedParameter, view: Tensor) -> None:
        view.copy_(record.shard)
        record.memory[Role.MASTER_SHARD] = view
        self.executor.parameters.move(record.index, view)
        record.install_shard()

    def _place_on_host(self, order: Sequence[ShardedParameter]) -> None:
        if self._host_masters is None or not order:
            return
        for record in order:
            if record.is_on_host:  # its place in host memory is about to be overwritten
                self._move(record, torch.empty_like(record.shard))
        pieces = _layouts_and_dtypes(order)
        self._host_masters.allocate(FlatBuffer.sizes(pieces))
        self.on_host = FlatBuffer(pieces, self._mesh.device, self._host_masters.device_tensors)
        for record, view in zip(order, self.on_host.views, strict=True):
            self._move(record, view)
            record.on_host = self._host_masters.on_host(view)
            record.spec.on_host = True
            self.executor.parameters.mark_on_host(record.index)

    def group_shards(
        self, groups: Sequence[Sequence[Tensor]], kind: Callable[[ShardedParameter], Any] = lambda record: 0
    ) -> None:
        """Make each parameter group's shards contiguous, so that the optimizer steps one flat tensor.

        Within a group, shards are sorted by ``kind``. Does nothing after training has begun.
        """
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
        self.finalize_layout(order)

    def finalize_layout(self, order: Sequence[ShardedParameter] | None = None) -> None:
        """Place the shards for the last time, by default in their present order. Collective.

        Does nothing if that is done.
        """
        if self._must_place_again:
            if self._transports is not None:
                self._transports.finalize_placement()
            self.place_shards(order or self._in_memory_order())

    @property
    def can_move_to_host(self) -> bool:
        """Return True if shards can still move to the host. The result is identical on every rank.

        Nothing may be laid out like them yet, and no rank may read another's.
        """
        return self._host_masters is None and not self._is_final and not self.executor.weights.uses_epoch_lock()

    def move_to_host(self, policy: HostMasterPolicy) -> None:
        """Move the shards that ``policy`` includes to the host. Collectives gather weights then."""
        assert self.can_move_to_host
        order, masters = self._in_memory_order(), HostMasters(policy)
        masters.allocate_together(
            FlatBuffer.sizes(_layouts_and_dtypes(list(filter(policy.includes, order)))), self._mesh
        )
        self._host_masters = masters
        if self._transports is not None:
            self._transports.move_shards_to_host()
        self.place_shards(order)

    @property
    def _is_final(self) -> bool:
        """Return True if training has begun, or there are no shards yet."""
        begun = any(set(record.memory) - {Role.MASTER_SHARD} for record in self._records)
        return self.shards is None or begun or self._unsharded is not None

    def _in_memory_order(self) -> list[ShardedParameter]:
        return sorted(self._records.live, key=lambda record: (*_buffer_key(record), record.shard.data_ptr()))

    @property
    def steps_write_copies(self) -> bool:
        """Return True if an optimizer step may write the compute shards.

        They are as large as shards, and no other rank reads them during a step: there is none, or an epoch lock.
        """
        read_by_peers = self._transports is not None and self._transports.weight_memory is not None
        return self._mesh.host_count == 1 and (not read_by_peers or self.executor.weights.uses_epoch_lock())

    # -- gradients

    def allocate_gradients(self) -> None:
        """Allocate gradients for the trainable parameters that have none. May be repeated.

        They are in the order of the shards.

        Parameters that become trainable later get another buffer. Call it after compute shards are allocated.
        """
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

    def allocate_deferred_gradients(self, full: bool) -> None:
        """Allocate memory that accumulates micro-batches before the reduce-scatter. May be repeated.

        Args:
            full: for full gradients; otherwise for those that the ranks of each host have reduced. The memory of the
                other kind is freed, and must hold no gradient.
        """
        if full != self._deferred_are_full:
            self.free_deferred_gradients()
            self._deferred_are_full = full
        new = [r for r in self._records.live if r.gradient is not None and Role.DEFERRED_GRADIENT not in r.memory]
        new.sort(key=lambda record: record.shard.data_ptr())
        wide = [torch.promote_types(record.param.dtype, torch.float32) for record in new]
        layouts = [_full_layout(record) if full else self._host_layout(record) for record in new]
        buffer = FlatBuffer(list(zip(layouts, wide, strict=True)), self._mesh.device)
        for record, view in zip(new, buffer.views, strict=True):
            record.memory[Role.DEFERRED_GRADIENT] = view
            self.executor.parameters.set_deferred_gradient(record.index, view, full)

    def free_deferred_gradients(self) -> None:
        for record in self._records:
            if record.memory.pop(Role.DEFERRED_GRADIENT, None) is not None:
                self.executor.parameters.set_deferred_gradient(record.index, None, False)

    # -- compute shards

    def allocate_transport_memory(self, copied_later: bool = False) -> bool:
        """Allocate what the transports need, see :meth:`PeerTransports.allocate`. Collective.

        Args:
            copied_later: leave out compute shards, which :meth:`allocate_some_compute_shards` allocates.
        """
        assert self._transports is not None

        allocate = _allocate_nothing if copied_later else self.allocate_compute_shards
        return self._transports.allocate(self.executor, allocate, self.allocate_host_shards)

    def allocate_compute_shards(self, dtype: torch.dtype | None, symm_mem: SymmetricMemory | None = None) -> None:
        """Allocate a compute shard for each wider floating-point shard. May be repeated. Collective.

        With ``symm_mem`` all ranks of the host can read them, and parameters that autocast leaves in full precision get
        full-precision shards.
        """
        if dtype is None or self.shards is None or self.tensors(Role.COMPUTE_SHARD):
            return
        wide = [t for t in self.shards.flat.values() if compute_dtype_of(t.dtype, dtype) != t.dtype]
        on_host = list(self.on_host.flat.values()) if self.on_host is not None else []
        copies: dict[tuple[bool, str], tuple[Tensor, list[Tensor]]] = {}
        for is_on_host, masters in chain(((False, t) for t in wide), ((True, t) for t in on_host)):
            if symm_mem is not None:
                copies[is_on_host, str(masters.dtype)] = symm_mem.empty(masters.numel(), dtype)
            else:
                copies[is_on_host, str(masters.dtype)] = torch.empty_like(masters, dtype=dtype), []
        copied = [record for record in self._records.live if _buffer_key(record) in copies]
        full_precision = (
            _allocate_full_precision(copied, symm_mem)
            if symm_mem is not None and not self.executor.weights.uses_epoch_lock()
            else []
        )
        # Tell the executor after all allocations have succeeded: it cannot use some of the compute shards.
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
        self._sync.before_writing()  # compute shards must be written before they are read

    def allocate_some_compute_shards(
        self, records: Sequence[ShardedParameter], dtype: torch.dtype, symm_mem: SymmetricMemory | None
    ) -> None:
        """Allocate a compute shard for each of these shards on the device, which have none.

        With ``symm_mem`` all ranks can read them, and the call is collective.
        """
        ordered = sorted(records, key=lambda record: record.shard.data_ptr())
        pieces = [(record.layout, dtype) for record in ordered]
        numel = FlatBuffer.sizes(pieces)[dtype]
        mine, all_ranks = (None, []) if symm_mem is None else symm_mem.empty(numel, dtype)
        buffer = FlatBuffer(pieces, self._mesh.device, None if mine is None else {dtype: mine})
        runs: list[list[Tensor]] = []  # shards that are adjacent in memory
        for record, view in zip(ordered, buffer.views, strict=True):
            record.memory[Role.COMPUTE_SHARD] = view
            self.executor.parameters.set_compute_shard(record.index, view)
            if all_ranks:
                self.executor.parameters.set_peer_compute_shards(record.index, _same_slices(view, all_ranks))
            if runs and runs[-1][-1].data_ptr() + runs[-1][-1].nbytes == record.shard.data_ptr():
                runs[-1].append(record.shard)
            else:
                runs.append([record.shard])
        [memory] = buffer.flat.values()
        begin = 0
        for run in runs:
            numel = sum(shard.numel() for shard in run)
            masters = run[0].as_strided((numel,), (1,), run[0].storage_offset())
            self.executor.parameters.add_compute_shard_memory(memory[begin : begin + numel], masters)
            begin += numel
        self._sync.before_writing()  # compute shards must be written before they are read

    def allocate_host_shards(self, dtype: torch.dtype | None, symm_mem: SymmetricMemory | None = None) -> None:
        """Allocate host shards, in the dtypes in which compiled code reads them. May be repeated. Collective."""
        if self.tensors(Role.COMPUTE_SHARD) or self.tensors(Role.FULL_PRECISION_SHARD):
            return
        wanted: list[tuple[ShardedParameter, Role, torch.dtype]] = []
        for record in self._records.live:
            own, used = record.param.dtype, compute_dtype_of(record.param.dtype, dtype)
            if used != own:
                wanted.append((record, Role.COMPUTE_SHARD, used))
            if used == own or stays_full_precision(record):
                wanted.append((record, Role.FULL_PRECISION_SHARD, own))
        pieces = [(self._host_layout(record), kind) for record, _, kind in wanted]
        sizes = FlatBuffer.sizes(pieces) if symm_mem is not None else {}
        peer_memory = {kind: symm_mem.empty(size, kind) for kind, size in sizes.items()} if symm_mem is not None else {}
        buffer = FlatBuffer(pieces, self._mesh.device, {kind: mine for kind, (mine, _) in peer_memory.items()})
        for (record, role, kind), view in zip(wanted, buffer.views, strict=True):  # after all allocations
            record.memory[role] = view
            theirs = _same_slices(view, peer_memory[kind][1]) if peer_memory else []
            if role is Role.FULL_PRECISION_SHARD:
                self.executor.parameters.set_full_precision_shard(record.index, view, theirs)
                continue
            self.executor.parameters.set_compute_shard(record.index, view)
            if theirs:
                self.executor.parameters.set_peer_compute_shards(record.index, theirs)
        self._sync.before_writing()  # host shards must be written before they are read

    def _host_layout(self, record: ShardedParameter) -> ShardLayout:
        """Return the layout of the parameter over the ranks of one host."""
        layout, hosts = record.layout, self._mesh.shard_host_count
        return replace(layout, shard_numel=hosts * layout.shard_numel, world_size=layout.world_size // hosts)

    # -- unsharded cache

    def cache_unsharded(self, dtype: torch.dtype | None, small_bytes: int, budget_bytes: float) -> None:
        """Allocate memory in which unsharded parameters stay until the optimizer steps.

        Their modules get views of it. May be repeated; other arguments replace the memory. Parameters of at most
        ``small_bytes`` are left out unless the budget is infinite, and so are those that do not fit into the budget. So
        are all if this rank's shards are whole weights, because graphs read them, or their compute shards, in place.
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
            layout, used = _full_layout(record), _use_dtype(record, dtype)
            size = layout.shard_numel * used.itemsize
            fits = record.layout.numel * used.itemsize > small_bytes and size <= budget_bytes
            if fits and not is_read_in_place(record.layout):
                budget_bytes -= size
                found.append((record, layout, used))
        existing = [self._existing_full_copy(record, used) for record, _, used in found]
        made = [(layout, used) for (_, layout, used), flat in zip(found, existing, strict=True) if flat is None]
        self._unsharded = FlatBuffer(made, self._mesh.device)
        new = iter(self._unsharded.views)
        for (record, layout, _), flat in zip(found, (next(new) if t is None else t for t in existing), strict=True):
            self.executor.parameters.set_unsharded_cache(record.index, flat)
            record.memory[Role.UNSHARDED_CACHE] = view = flat[: layout.numel].view(layout.shape)
            for owner, key in record.owners:
                owner.__dict__.setdefault(UNSHARDED_CACHE, {})[key] = view

    def _existing_full_copy(self, record: ShardedParameter, dtype: torch.dtype) -> Tensor | None:
        """Return the host shard in ``dtype`` if it is the full parameter, which needs no other memory then."""
        role = Role.FULL_PRECISION_SHARD if dtype == record.param.dtype else Role.COMPUTE_SHARD
        copy = record.memory.get(role)
        is_full = self._mesh.inter_host_shard_group is not None and self._mesh.intra_host.size == 1
        return copy if is_full and copy is not None and copy.dtype == dtype else None

    def unsharded_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of all unsharded copies, with padding, in the dtypes of ``cache_unsharded``."""
        total = 0
        for record in self._records.live:
            used = _use_dtype(record, dtype)
            if not is_read_in_place(record.layout):
                total += _full_layout(record).shard_numel * used.itemsize
        return total

    def _free_unsharded(self) -> None:
        self._unsharded = None
        for record in self._records:
            if record.memory.pop(Role.UNSHARDED_CACHE, None) is not None:
                self.executor.parameters.set_unsharded_cache(record.index, None)
                for owner, key in record.owners:
                    owner.__dict__[UNSHARDED_CACHE].pop(key, None)


def _allocate_nothing(dtype: torch.dtype | None, symm_mem: SymmetricMemory | None) -> None:
    pass


def _full_layout(record: ShardedParameter) -> ShardLayout:
    """Return a layout of one shard: the full parameter and its padding, as compiled code reads it."""
    layout = record.layout
    return ShardLayout(layout.memory_shape, layout.shard_numel * layout.world_size, 1)


def _layouts_and_dtypes(order: Sequence[ShardedParameter]) -> list[tuple[ShardLayout, torch.dtype]]:
    return [(record.layout, record.param.dtype) for record in order]


def _buffer_key(record: ShardedParameter) -> tuple[bool, str]:
    return record.is_on_host, str(record.param.dtype)


def _same_slices(shard: Tensor, memory: Sequence[Tensor]) -> list[Tensor]:
    """Return the slice of each tensor that corresponds to ``shard``, for tensors laid out like its buffer."""
    begin = shard.storage_offset()
    return [tensor[begin : begin + shard.numel()] for tensor in memory]


def _use_dtype(record: ShardedParameter, dtype: torch.dtype | None) -> torch.dtype:
    own: torch.dtype = record.param.dtype
    return own if stays_full_precision(record) else compute_dtype_of(own, dtype)


def is_read_in_place(layout: ShardLayout) -> bool:
    """Return True if compiled code reads the shard or compute shard itself: it is the full parameter."""
    return layout.world_size == 1


def _allocate_full_precision(
    copied: Sequence[ShardedParameter], symm_mem: SymmetricMemory
) -> list[tuple[ShardedParameter, Tensor, list[Tensor]]]:
    """Return memory for parameters that autocast leaves in full precision: this rank's and all ranks'."""
    by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
    for record in copied:
        if stays_full_precision(record):
            by_dtype.setdefault(record.param.dtype, []).append(record)
    found = []
    for dtype, records in by_dtype.items():
        sizes = [record.layout.shard_numel for record in records]
        mine, all_ranks = symm_mem.empty(sum(sizes), dtype)
        pieces = zip(mine.split(sizes), *(memory.split(sizes) for memory in all_ranks), strict=True)
        found += [(record, own, list(theirs)) for record, (own, *theirs) in zip(records, pieces, strict=True)]
    return found
