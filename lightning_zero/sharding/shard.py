"""Turns a module's parameters into shards, in place, one parameter at a time.

Protocol: ``shard_module(m)`` cuts the parameters that ``m`` itself owns (used while a model is being built, so that no
rank ever holds it whole); ``finish(root)`` cuts what is left, materialises what is on the meta device module by module,
and moves all shards into arenas. Every rank must do the same in the same order: values come from rank 0.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Lane
from lightning_zero.sharding.access import ShardAccess
from lightning_zero.sharding.arena import Arena
from lightning_zero.sharding.layout import ShardLayout, memory_order
from lightning_zero.sharding.peers import PeerMemory, Peers
from lightning_zero.sharding.reductions import engine_is_gone
from lightning_zero.sharding.refusals import plainly
from lightning_zero.sharding.sight import Sight
from lightning_zero.sharding.surgery import KEPT, ORDERS, SHAPES, ClassCache, is_sharded

__all__ = ["Sharder", "ShardedParameter"]


@dataclass
class ShardedParameter:
    """One parameter, whole on no rank. ``owners`` are the (module, name) pairs that read it: several when it is
    tied."""

    index: int
    name: str
    param: nn.Parameter
    layout: ShardLayout
    shard: Tensor
    sight: Sight = field(repr=False)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    copied: bool = False  # by a module that may have been no more than a pattern

    def show_shard(self) -> None:
        """Points the visible parameter at the shard. It goes on counting the whole parameter's elements: that is what
        ``sum(p.numel() for p in model.parameters())`` and Lightning's model summary are for."""
        with plainly():
            self.param.data = self.shard.view(self.layout.visible_shape)
            self.sight.memory = self.shard.untyped_storage().data_ptr()
        self.param.__dict__["numel"] = self.param.__dict__["nelement"] = partial(int, self.layout.numel)
        self.sight.show(self.param)

    def show_whole(self, value: Tensor) -> None:
        """Makes the visible parameter an ordinary one with this value."""
        Sight.hide(self.param)
        self.param.data = value
        for name in ("numel", "nelement"):
            self.param.__dict__.pop(name, None)


class Sharder:
    """Shards parameters and knows them afterwards.

    Args:
        executor: where shards are registered.
        mesh: of the ranks that hold a shard each; initial values are rank 0's.
        peers: lays the shards out where other ranks can read them, if that is possible.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        peers: Peers | None = None,
    ) -> None:
        self.executor = executor
        self.access = ShardAccess(executor)
        self._peers = peers
        self.mesh = mesh
        self.classes = ClassCache()
        self.view = self.classes.view  # what eager code reads
        self.parameters: list[ShardedParameter] = []
        self.arena: Arena | None = None
        self.grad_arena: Arena | None = None
        self.gradients: dict[int, Tensor] = {}  # by index, each trainable parameter's 1-D part of a gradient arena
        self.shown: dict[int, Tensor] = {}  # the same as ``param.grad``, once a backward has brought one
        self._kept: Arena | None = None
        self._shadows: list[Tensor] = []  # low-precision copies, one for each master dtype
        self._by_param: dict[int, ShardedParameter] = {}
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # while a model is built, by ids of the old

    def find(self, param: Tensor) -> ShardedParameter | None:
        """The record of a visible parameter, or None."""
        record = self._by_param.get(id(param))
        return record if record is not None and record.param is param else None

    def at(self, index: int) -> ShardedParameter:
        return self.parameters[index]

    # -- cutting

    def shard_module(self, module: nn.Module, name: str = "") -> None:
        """Shards the parameters that ``module`` owns itself and that are not sharded yet. Collective."""
        own = [(key, param) for key, param in module._parameters.items() if param is not None]
        if not own or all(self.find(param) and is_sharded(module) for _, param in own):
            return
        if any(param.is_meta and not self.find(param) for _, param in own):
            own = self._materialise(module, name)
        for key, param in own:
            record = self.find(param)
            if record is None:
                record = self._cut(f"{name}.{key}" if name else key, param)
                module._parameters[key] = record.param
            self.adopt(module, key, record)

    def adopt(self, module: nn.Module, key: str, record: ShardedParameter) -> None:
        """Makes ``module``'s parameter ``key`` read ``record``."""
        for other in self.parameters:
            other.owners = [(m, k) for m, k in other.owners if not (m is module and k == key)]
        record.owners.append((module, key))
        module.__dict__.setdefault(SHAPES, {})[key] = tuple(record.layout.shape)
        if record.layout.order is not None:
            module.__dict__.setdefault(ORDERS, {})[key] = record.layout.order
        self.classes.swap(module, tuple(sorted(module.__dict__[SHAPES])))

    def _cut(self, name: str, param: nn.Parameter) -> ShardedParameter:
        _check(name, param)
        device, world = self.mesh.device, self.mesh.world_size
        layout = ShardLayout.of(param.shape, param.dtype, world, memory_order(param))
        full = layout.stored(param.detach().to(device)).contiguous()
        if world > 1 and layout.numel:
            if full.data_ptr() == param.data_ptr():
                full = full.clone()  # a view into something larger may be shared with code that still needs it
            dist.broadcast(full, group=self.mesh.shard_group, group_src=0)
        shard = torch.empty(layout.shard_numel, dtype=param.dtype, device=device)
        layout.write(shard, layout.restored(full), self.mesh.rank)
        return self._register(name, param, shard, layout)

    def twin(self, record: ShardedParameter) -> ShardedParameter:
        """Another parameter, of the same values, that no module reads yet."""
        record.copied = True
        shard = record.shard.clone()
        param = nn.Parameter(shard.view(record.layout.visible_shape), record.param.requires_grad)
        return self._register(record.name, param, shard, record.layout)

    def _register(self, name: str, param: nn.Parameter, shard: Tensor, layout: ShardLayout) -> ShardedParameter:
        index = self.executor.parameters.add(name, param, shard, layout.shape, layout.order)
        device = self.mesh.device
        sight = Sight(
            name,
            layout,
            self.mesh.rank,
            device,
            weakref.ref(self.mesh.shard_group),
            partial(_tell, weakref.ref(self)),
            partial(_reduce, weakref.ref(self), name),
        )
        record = ShardedParameter(index, name, param, layout, shard, sight)
        record.show_shard()
        self.parameters.append(record)
        self._by_param[id(param)] = record
        return record

    def _materialise(self, module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not callable(reset):
            raise UnsupportedError(
                f"Module {name or 'root'!r} ({type(module).__name__}) has parameters on the meta device but no "
                "reset_parameters() to "
                "give them values. Add that method, or build the module inside configure_model() without the meta "
                "device: "
                "lightning_zero shards each layer as soon as it is built."
            )
        # Ties are kept by the identity of the parameter object: remember which new object replaces which.
        before = dict(module._parameters)
        device, shapes = self.mesh.device, module.__dict__.get(SHAPES, {})
        already = {key: self.find(param) for key, param in before.items() if param is not None}
        for key, param in before.items():
            record = already.get(key)
            if record is not None:
                # Tied to a module that came before: whole for a while, since reset_parameters() looks at its shape.
                stored = list(record.layout.stored_shape)
                whole = torch.ops.lightning_zero.gather(record.param, stored, record.param.dtype).detach()
                module._parameters[key] = nn.Parameter(record.layout.restored(whole), record.param.requires_grad)
                shapes[key] = None
            elif param is not None and param.is_meta:
                module._parameters[key] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        with torch.no_grad():
            reset()
        for key, record in already.items():
            if record is not None:
                module._parameters[key] = record.param
                shapes[key] = tuple(record.layout.shape)
        for key, old in before.items():
            new = module._parameters[key]
            if old is not None and new is not None and new is not old:
                new.__dict__.update(old.__dict__)
                self._replaced[id(old)] = (old, new)
        return [(key, param) for key, param in module._parameters.items() if param is not None]

    # -- finishing

    def finish(self, root: nn.Module) -> None:
        """Shards everything that is left in ``root`` and lays the shards out in arenas. Collective.

        Raises:
            RankMismatchError: ranks hold different models.
            UnsupportedError: a parameter that cannot be sharded.
        """
        self._compare_ranks(root)
        # All of it before anything is cut: a module that is refused stays as it was.
        for name, module in root.named_modules():
            for key, param in module._parameters.items():
                if param is not None and self.find(param) is None:
                    self.classes.check(module)
                    _check(f"{name}.{key}" if name else key, param)
        for name, module in root.named_modules():
            for key, param in list(module._parameters.items()):
                if param is not None and id(param) in self._replaced:
                    module._parameters[key] = self._replaced[id(param)][1]
            self.shard_module(module, name)
            self._move_buffers(module, name)
        self._replaced.clear()
        inside = set(map(id, root.modules()))
        for record in self.parameters:
            if record.copied:
                record.owners = [(module, key) for module, key in record.owners if id(module) in inside]
        names = {id(param): name for name, param in root.named_parameters()}
        for record in self.parameters:
            record.name = record.sight.name = names.get(id(record.param), record.name)
        self._lay_out()

    def _compare_ranks(self, root: nn.Module) -> None:
        mine = [
            f"{name} {_shape(param)} {param.dtype} {param.requires_grad}"
            for name, param in root.named_parameters(remove_duplicate=False)
        ]
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        if len(set(self.mesh.gathered(digest))) == 1:
            return
        models = self.mesh.gathered(mine)
        other = next(rank for rank, model in enumerate(models) if model != models[0])
        pairs = list(zip(models[0] + ["(nothing)"], models[other] + ["(nothing)"], strict=False))
        first = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
        raise RankMismatchError(
            f"Ranks hold different models. The first difference between rank 0 and rank {other}: {first[0]!r} against "
            f"{first[1]!r} "
            "(name, shape, dtype, requires_grad). Build the same model on every rank; data may differ, parameters may "
            "not."
        )

    def _move_buffers(self, module: nn.Module, name: str) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != self.mesh.device:
                if buffer.is_meta:
                    raise UnsupportedError(
                        f"Buffer {(f'{name}.{key}' if name else key)!r} ({type(module).__name__}) is on the meta "
                        "device and has no value. Set it in reset_parameters(), or register it on a real device."
                    )
                module._buffers[key] = buffer.to(self.mesh.device)

    def _lay_out(self) -> None:
        # Reverse order of registration: gradients come in that order, so a bucket's shards are neighbours here.
        orphans = [record for record in self.parameters if not record.owners]
        for record in orphans:
            self.executor.parameters.drop(record.index)
        self._place([record for record in reversed(self.parameters) if record.owners])

    def arrange(self, groups: Sequence[Sequence[Tensor]], by_dimensions: bool = False) -> None:
        """Makes the shards of each group of parameters neighbours, so that an optimizer can step a group as one tensor;
        within a group, those with the same number of dimensions if asked. Nothing happens once training has begun."""
        if self.arena is None or self.gradients or self._shadows or self._kept:
            return
        number = {id(param): n for n, group in enumerate(groups) for param in group}
        before = sorted(self.live, key=lambda record: record.shard.data_ptr())
        order = sorted(
            before,
            key=lambda r: (number.get(id(r.param), len(groups)), r.param.dim() if by_dimensions else 0),
        )
        if [record.index for record in order] != [record.index for record in before]:
            self._place(order)

    def _place(self, live: list[ShardedParameter]) -> None:
        pieces = [(record.layout, record.param.dtype) for record in live]
        everywhere = self._peers.allocate_shards(self.executor, Arena.sizes(pieces)) if self._peers else {}
        self.access.before_writing()
        arena = Arena(pieces, self.mesh.device, {dtype: mine for dtype, (mine, _) in everywhere.items()})
        for record, view in zip(live, arena.views, strict=True):
            view.copy_(record.shard)
            record.shard = view
            self.executor.parameters.move(record.index, view)
            record.show_shard()
            if everywhere:
                part = slice(view.storage_offset(), view.storage_offset() + view.numel())
                self.executor.parameters.set_shards(
                    record.index, [memory[part] for memory in everywhere[view.dtype][1]]
                )
        self.arena = arena
        self.access.done_writing()

    def allocate_gradients(self) -> None:
        """Lays out the gradient arena, in the shards' order, for the parameters that are trainable now; parameters that
        become trainable later get another. Harmless when repeated."""
        with plainly():
            new = [r for r in self.parameters if r.owners and r.param.requires_grad and r.index not in self.gradients]
        if not new:
            return
        new.sort(key=lambda record: record.shard.data_ptr())
        arena = Arena([(record.layout, record.param.dtype) for record in new], self.mesh.device)
        for record, view in zip(new, arena.views, strict=True):
            self.executor.parameters.set_grad(record.index, view)
            self.gradients[record.index] = view
        self.grad_arena = self.grad_arena or arena

    def allocate_shadows(self, dtype: torch.dtype, peers: PeerMemory | None = None) -> None:
        """Memory for all wider floating point shards in ``dtype``, laid out like the shards; such that all ranks can
        read it, if ``peers`` is given. Harmless when repeated. Collective."""
        if self._shadows or self.arena is None:
            return
        wide = [t for t in self.arena.flat.values() if t.is_floating_point() and t.dtype.itemsize > dtype.itemsize]
        copies: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}
        for masters in wide:
            if peers is not None:
                copies[masters.dtype] = peers.empty(masters.numel(), dtype)
            else:
                copies[masters.dtype] = torch.empty_like(masters, dtype=dtype), []
        shadowed = [record for record in self.live if record.param.dtype in copies]
        exact = (
            self._allocate_exact(shadowed, peers)
            if peers is not None and not self.executor.weights.takes_turns()
            else {}
        )
        # Made known only now that there is memory for all: half of it would be worse than none.
        for masters in wide:
            self._shadows.append(copies[masters.dtype][0])
            self.executor.parameters.add_shadow_memory(self._shadows[-1], masters)
        for record in shadowed:
            copy, all_ranks = copies[record.param.dtype]
            part = slice(record.shard.storage_offset(), record.shard.storage_offset() + record.layout.shard_numel)
            self.executor.parameters.set_shadow(record.index, copy[part])
            if all_ranks:
                self.executor.parameters.set_peers(record.index, [memory[part] for memory in all_ranks])
        for index, (mine, *theirs) in exact.items():
            self.executor.parameters.set_exact(index, mine, theirs)
        self.access.before_writing()  # what is to be read first must be written

    def _allocate_exact(self, shadowed: list[ShardedParameter], peers: PeerMemory) -> dict[int, tuple[Tensor, ...]]:
        """Autocast leaves norms and embeddings in full precision, so their shadows are not what is gathered. By index:
        memory on this rank, and on each."""
        by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
        for record in shadowed:
            if len(record.layout.shape) < 2 or any(isinstance(owner, nn.Embedding) for owner, _ in record.owners):
                by_dtype.setdefault(record.param.dtype, []).append(record)
        found: dict[int, tuple[Tensor, ...]] = {}
        for dtype, records in by_dtype.items():
            sizes = [record.layout.shard_numel for record in records]
            mine, all_ranks = peers.empty(sum(sizes), dtype)
            parts = zip(mine.split(sizes), *(memory.split(sizes) for memory in all_ranks), strict=True)
            found.update(zip([record.index for record in records], parts, strict=True))
        return found

    def allocate_kept(self, dtype: torch.dtype | None, small_bytes: int, budget_bytes: float) -> None:
        """Memory for whole parameters, in which compiled code keeps them until the optimizer steps. Harmless when
        repeated.

        Args:
            dtype: that floating point parameters of a wider one are used in; None for their own.
            small_bytes: parameters of at most this size are left out.
            budget_bytes: for all together; one that does not fit is skipped.
        """
        if self._kept:
            return
        layouts: list[tuple[ShardedParameter, ShardLayout, torch.dtype]] = []
        for record in self.live:
            own = record.param.dtype
            used = dtype if dtype is not None and own.is_floating_point and own.itemsize > dtype.itemsize else own
            shape = record.layout.stored_shape  # as compiled code reads it
            whole = ShardLayout(shape, record.layout.shard_numel * record.layout.world_size, 1)
            size = whole.shard_numel * used.itemsize
            if record.layout.numel * used.itemsize > small_bytes and size <= budget_bytes:
                budget_bytes -= size
                layouts.append((record, whole, used))
        self._kept = Arena([(whole, used) for _, whole, used in layouts], self.mesh.device)
        for (record, whole, _), flat in zip(layouts, self._kept.views, strict=True):
            self.executor.parameters.set_kept(record.index, flat)
            view = flat[: whole.numel].view(whole.shape)
            for owner, key in record.owners:
                owner.__dict__.setdefault(KEPT, {})[key] = view

    @property
    def kept(self) -> Iterator[Tensor]:
        """What :meth:`allocate_kept` has shown to modules."""
        return (
            view for record in self.live for owner, _ in record.owners for view in owner.__dict__.get(KEPT, {}).values()
        )

    @property
    def live(self) -> list[ShardedParameter]:
        """All parameters that some module reads, in the order of registration."""
        return [record for record in self.parameters if record.owners]


def _tell(sharder: weakref.ref[Sharder], all_of_it: bool) -> None:
    known = sharder()
    if known is not None:
        # Weights that were read before are older than what is assigned.
        known.access.before_overwriting() if all_of_it else known.access.before_writing()


def _reduce(sharder: weakref.ref[Sharder], name: str, start: Callable[[bool], dist.Work | None]) -> None:
    known = sharder()
    if known is None:
        raise UnsupportedError(engine_is_gone(name))
    known.executor.collective(f"a reduction over all of {name!r}, such as its norm", Lane.GATHER, start)


def _shape(param: nn.Parameter) -> str:
    lazy = torch.nn.parameter.is_lazy(param)
    return "(not known yet)" if lazy else str(tuple(param.shape))


def _check(name: str, param: nn.Parameter) -> None:
    if torch.nn.parameter.is_lazy(param):
        raise UnsupportedError(
            f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the model, or give it its "
            "sizes, before training."
        )
    if param.is_complex() or param.is_quantized or param.is_sparse:
        raise UnsupportedError(
            f"Parameter {name!r} has dtype {param.dtype} and layout {param.layout}; only dense real parameters can be "
            "sharded. "
            "Store a complex parameter as real and imaginary parts (torch.view_as_real)."
        )
    if hasattr(param, "device_mesh"):
        raise UnsupportedError(
            f"Parameter {name!r} is a DTensor: the module was sharded by something else (fully_shard, "
            "parallelize_module). "
            "Remove that call from configure_model()."
        )
