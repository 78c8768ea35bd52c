"""Turns a module's parameters into shards, in place, one parameter at a time.

Protocol: ``shard_module(m)`` cuts the parameters that ``m`` itself owns (used while a model is being built, so that no
rank ever holds it whole); ``finish(root)`` cuts what is left, materialises what is on the meta device module by module,
and moves all shards into arenas. Every rank must do the same in the same order: values come from rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.argument_checks import check_tensor_arguments
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.aliases import Aliases, check_shared_memory
from lightning_zero.sharding.checks import check_module, check_parameter, check_same_model
from lightning_zero.sharding.host_policy import HostMasterPolicy
from lightning_zero.sharding.layout import ShardLayout, as_real, memory_order
from lightning_zero.sharding.materialise import Materialiser
from lightning_zero.sharding.memory import ShardMemory
from lightning_zero.sharding.module_patching import ORDERS, SHAPES, ClassCache, is_sharded
from lightning_zero.sharding.operands import closed_engine_message
from lightning_zero.sharding.record import Records, Role, ShardedParameter
from lightning_zero.sharding.shard_sync import ShardSync
from lightning_zero.sharding.shard_tensor import ShardSpec, full_arguments
from lightning_zero.sharding.symm_mem import PeerTransports

__all__ = ["Sharder"]


class Sharder:
    """Cuts parameters, and knows them afterwards.

    Args:
        executor: where shards are registered.
        mesh: of the ranks that hold a shard each; initial values are rank 0's.
        peers: lays the shards out where other ranks can read them, if that is possible.
        away: which of them lie on the host; None: none.
        over_copies: gradients lie over compute copies.

    Attributes:
        access: says when shards may be read and written.
        records: of all parameters that were ever sharded.
        memory: theirs.
        classes: of the modules that own shards.
        view: what eager code reads of these.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        peers: PeerTransports | None = None,
        away: HostMasterPolicy | None = None,
        over_copies: bool = False,
    ) -> None:
        check_tensor_arguments(full_arguments)
        self.executor = executor
        self.sync = ShardSync(executor)
        self.mesh = mesh
        self.records = Records()
        self.memory = ShardMemory(executor, mesh, self.records, peers, away)
        self.memory.over_copies = over_copies
        self.classes = ClassCache()
        self.view = self.classes.view
        self._aliases = Aliases()
        self._materialiser = Materialiser(self.records, mesh.device)
        self._read: dict[tuple[int, str], ShardedParameter] = {}  # by a module's id and a parameter's name

    def find(self, param: Tensor) -> ShardedParameter | None:
        """The record of a visible parameter, or None."""
        return self.records.find(param)

    @property
    def live(self) -> list[ShardedParameter]:
        """The records of all parameters that some module reads, in the order of registration."""
        return self.records.live

    # -- cutting

    def shard_module(self, module: nn.Module, name: str = "") -> None:
        """Shards the parameters that ``module`` owns itself and that are not sharded yet. Collective."""
        own = [(key, param) for key, param in module._parameters.items() if param is not None]
        if not own or all(self.find(param) and is_sharded(module) for _, param in own):
            return
        check_module(name, module)
        if any(param.is_meta and not self.find(param) for _, param in own):
            own = self._materialiser.values(module, name)
        for key, param in own:
            record = self.find(param)
            if record is None:
                record = self._cut(f"{name}.{key}" if name else key, param)
                module._parameters[key] = record.param
            self.adopt(module, key, record)

    def adopt(self, module: nn.Module, key: str, record: ShardedParameter) -> None:
        """Makes ``module``'s parameter ``key`` read ``record``."""
        before = self._read.get((id(module), key))
        if before is not None:  # by this module, or by one that is gone and had its number
            before.owners = [(m, k) for m, k in before.owners if not (m is module and k == key)]
        self._read[id(module), key] = record
        record.owners.append((module, key))
        module.__dict__.setdefault(SHAPES, {})[key] = tuple(record.layout.shape)
        if record.layout.order is not None:
            module.__dict__.setdefault(ORDERS, {})[key] = record.layout.order
        self.classes.swap(module, tuple(sorted(module.__dict__[SHAPES])))

    def _cut(self, name: str, param: nn.Parameter) -> ShardedParameter:
        check_parameter(name, param)
        noted = self._aliases.note(param)
        layout = ShardLayout.of(param.shape, param.dtype, self.mesh.shard_group.size, memory_order(param))
        if self.mesh.rank > 0 and layout.numel:
            # Values of this rank's own serve nobody, and would take as long to the device as rank 0's do.
            full = torch.empty(layout.memory_shape, dtype=param.dtype, device=self.mesh.device)
        else:
            full = layout.permute_to_memory(param.detach().to(self.mesh.device)).resolve_conj().resolve_neg().contiguous()
        if self.mesh.world_size > 1 and layout.numel:
            dist.broadcast(as_real(full), group=self.mesh.gather_group, group_src=0)
        shard = layout.part(layout.permute_from_memory(full), self.mesh.shard_index)
        record = self._register(name, param, shard.view(-1), layout)
        self._aliases.cut(noted, record)
        return record

    def twin(self, record: ShardedParameter) -> ShardedParameter:
        """Another parameter, of the same values, that no module reads yet."""
        record.copied = True
        shard = record.shard.clone()
        param = nn.Parameter(shard.view(record.layout.visible_shape), record.param.requires_grad)
        return self._register(record.name, param, shard, record.layout)

    def _register(self, name: str, param: nn.Parameter, shard: Tensor, layout: ShardLayout) -> ShardedParameter:
        index = self.executor.parameters.add(name, param, shard, layout.shape, layout.order)
        device = self.mesh.device
        spec = ShardSpec(
            name,
            layout,
            self.mesh.shard_index,
            device,
            weakref.ref(self.mesh.shard_group.gather_group),
            partial(_tell, weakref.ref(self)),
            partial(_reduce, weakref.ref(self), name),
        )
        record = ShardedParameter(index, name, param, layout, {Role.MASTER_SHARD: shard}, spec)
        record.install_shard()
        self.records.add(record)
        return record

    # -- finishing

    def finish(self, root: nn.Module) -> None:
        """Shards everything that is left in ``root`` and lays the shards out in arenas. Collective.

        Raises:
            RankMismatchError: ranks hold different models.
            UnsupportedError: a parameter that cannot be sharded.
        """
        check_same_model(root, self.mesh)
        # All of it before anything is cut: a module that is refused stays as it was.
        for name, module in root.named_modules():
            check_module(name, module)
            for key, param in module._parameters.items():
                if param is not None and self.find(param) is None:
                    self.classes.check(module)
                    check_parameter(f"{name}.{key}" if name else key, param)
        check_shared_memory(
            {name: param for name, param in root.named_parameters() if self.find(param) is None},
            dict(root.named_buffers()),
        )
        for name, module in root.named_modules():
            for key, param in list(module._parameters.items()):
                if param is not None:
                    module._parameters[key] = self._materialiser.latest(param)
            self.shard_module(module, name)
            self._move_buffers(module, name)
        self._materialiser.forget()
        inside = set(map(id, root.modules()))
        for record in self.records:
            if record.copied:
                record.owners = [(module, key) for module, key in record.owners if id(module) in inside]
        names = {id(param): name for name, param in root.named_parameters()}
        for record in self.records:
            record.name = record.spec.name = names.get(id(record.param), record.name)
        self._lay_out()
        self._aliases.resolve()

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
        for record in self.records:
            if not record.owners:
                self.executor.parameters.drop(record.index)
        self.memory.place(self.live[::-1])


def _tell(sharder: weakref.ref[Sharder], all_of_it: bool) -> None:
    known = sharder()
    if known is not None:
        # Weights that were read before are older than what is assigned.
        known.sync.before_overwriting() if all_of_it else known.sync.before_writing()


def _reduce(sharder: weakref.ref[Sharder], name: str, start: Callable[[bool], dist.Work | None]) -> None:
    known = sharder()
    if known is None:
        raise UnsupportedError(closed_engine_message(name))
    known.executor.collective(f"a reduction over all of {name!r}, such as its norm", SequenceId.GATHER, start)
