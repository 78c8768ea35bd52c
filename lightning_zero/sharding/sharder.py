"""Shard a module's parameters in place, one parameter at a time.

``shard_module(m)`` shards the parameters that ``m`` itself owns, and is used while a model is being built.
``finish(root)`` checks the model, materializes modules on the meta device one by one, shards the other parameters, and
moves all shards into flat buffers. Every rank must make the same calls in the same order. Values come from rank 0.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.argument_checks import check_tensor_arguments
from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.adapted_parameters import mark_adapted_parameters
from lightning_zero.sharding.aliases import Aliases, check_shared_memory
from lightning_zero.sharding.flat_memory import HostMasterPolicy, ShardMemory
from lightning_zero.sharding.frozen_weights import FrozenWeights, check_not_quantized, warn_of_rest
from lightning_zero.sharding.layout import ShardLayout, as_real, is_strided, memory_order
from lightning_zero.sharding.module_patching import FORMATS, ORDERS, SHAPES, ClassCache, is_sharded
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter, gather_full
from lightning_zero.sharding.shard_rules import rule_of
from lightning_zero.sharding.shard_tensor import ShardSpec, closed_engine_message, full_arguments, set_rules
from lightning_zero.sharding.symm_mem import PeerTransports
from lightning_zero.sharding.weight_format import WeightFormat
from lightning_zero.sharding.weight_reader import ShardSync


def check_module(name: str, module: nn.Module) -> None:
    """Raise :class:`UnsupportedError` for a module whose forward writes to its weight.

    It would write to a gathered copy, and ranks would write different values.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise UnsupportedError(
            f"Module {name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward scales the rows of "
            "its batch in place, and each rank has another batch. Leave max_norm out, and scale all rows after the "
            "step, on every rank: in on_train_batch_end, `with torch.no_grad(): module.weight.renorm_("
            f"{module.norm_type:g}, 0, {module.max_norm:g})`."
        )


def check_parameter(name: str, param: nn.Parameter) -> None:
    """Raise :class:`UnsupportedError` for a parameter that cannot be sharded."""
    if torch.nn.parameter.is_lazy(param):
        raise UnsupportedError(
            f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the model, or give it its "
            "sizes, before training."
        )
    check_not_quantized(name, param)
    if not is_strided(param):
        raise UnsupportedError(
            f"Parameter {name!r} has dtype {param.dtype} and layout {param.layout}; only dense parameters can be "
            "sharded. Store its dense values."
        )
    if param.dtype is torch.complex32:
        raise UnsupportedError(
            f"Parameter {name!r} has dtype torch.complex32, for which torch lacks most functions. Store it as "
            "torch.complex64."
        )
    if hasattr(param, "device_mesh"):
        raise UnsupportedError(
            f"Parameter {name!r} is a DTensor: the module was sharded by something else (fully_shard, "
            "parallelize_module). "
            "Remove that call from configure_model()."
        )


def check_same_model(root: nn.Module, mesh: Mesh) -> None:
    """Raise :class:`RankMismatchError` on every rank if ranks hold different models. Collective."""
    mine = [
        f"{name} {_shape(param)} {param.dtype} {param.requires_grad}"
        for name, param in root.named_parameters(remove_duplicate=False)
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(mesh.all_gather_values(digest))) == 1:
        return
    found = mesh.first_difference(mine)
    assert found is not None
    other, first, second = found
    raise RankMismatchError(
        f"Ranks hold different models. The first difference between rank 0 and rank {other}: {first!r} against "
        f"{second!r} (name, shape, dtype, requires_grad). Build the same model on every rank; data may differ, "
        "parameters may not."
    )


def _shape(param: nn.Parameter) -> str:
    lazy = torch.nn.parameter.is_lazy(param)
    return "(not known yet)" if lazy else str(tuple(param.shape))


class Materializer:
    """Materialize modules on the meta device by their own ``reset_parameters()``.

    It remembers which parameter replaces which, because the other modules of a tie still hold the old object.
    """

    def __init__(self, records: Records, device: torch.device) -> None:
        self._records = records
        self._device = device
        self._replaced: dict[
            int, tuple[nn.Parameter, nn.Parameter]
        ] = {}  # old and new; the old one is kept, so that its id is not reused

    def latest(self, param: nn.Parameter) -> nn.Parameter:
        """Return the parameter that replaces ``param``, or ``param`` itself."""
        return self._replaced.get(id(param), (param, param))[1]

    def forget(self) -> None:
        """Drop the map of replaced parameters, after all ties are made."""
        self._replaced.clear()

    def values(self, module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
        """Give ``module``'s own parameters and buffers values on the device; return parameters by name.

        Collective if one of them is sharded already.
        """
        reset = _reset_of(module, name)
        before = dict(module._parameters)
        device, shapes = self._device, module.__dict__.get(SHAPES, {})
        already = {key: self._records.find(param) for key, param in before.items() if param is not None}
        for key, param in before.items():
            record = already.get(key)
            if record is not None:
                # Tied to an earlier module: install the full parameter, because reset_parameters() looks at its shape.
                module._parameters[key] = nn.Parameter(gather_full(record), record.param.requires_grad)
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
                shapes[key] = tuple(record.shape)
        for key, old in before.items():
            new = module._parameters[key]
            if old is not None and new is not None and new is not old:
                new.__dict__.update(old.__dict__)
                new._backward_hooks = old._backward_hooks
                new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
                self._replaced[id(old)] = (old, new)
        return [(key, param) for key, param in module._parameters.items() if param is not None]


def _reset_of(module: nn.Module, name: str) -> Any:
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise UnsupportedError(
            f"Module {name or 'root'!r} ({type(module).__name__}) has parameters on the meta device but no "
            "reset_parameters() to give them values. Add that method, or build the module inside configure_model() "
            "without the meta device: lightning_zero shards each layer as soon as it is built."
        )
    return reset


class Sharder:
    """Shard parameters, and hold their records.

    Args:
        mesh: of the ranks that hold a shard each; initial values come from rank 0.
        transports: allocate the shards in memory that other ranks can read, if possible.
        policy: which shards are stored on the host; None: none.
        state_blocks: see :meth:`ShardLayout.from_shape`.
        frozen: which frozen weights are stored packed; None: none.

    Attributes:
        records: of all parameters that were ever sharded.
        classes: subclasses of the modules that own shards.
        reader: decides what eager code reads from these modules.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        transports: PeerTransports | None = None,
        policy: HostMasterPolicy | None = None,
        alias_gradients: bool = False,
        state_blocks: bool = False,
        frozen: FrozenWeights | None = None,
    ) -> None:
        check_tensor_arguments(full_arguments)
        set_rules(rule_of)
        self.executor = executor
        self.sync = ShardSync(executor)
        self.mesh = mesh
        self.records = Records()
        self.memory = ShardMemory(executor, mesh, self.records, transports, policy, alias_gradients)
        self.classes = ClassCache()
        self.reader = self.classes.reader
        self._state_blocks = state_blocks
        self._aliases = Aliases()
        self._materializer = Materializer(self.records, mesh.device)
        self._frozen = frozen
        self._formats: dict[tuple[int, str], WeightFormat] = {}  # by a module's id and a parameter's name
        self._read: dict[tuple[int, str], ShardedParameter] = {}  # by a module's id and a parameter's name

    def find(self, param: Tensor) -> ShardedParameter | None:
        return self.records.find(param)

    @property
    def live(self) -> list[ShardedParameter]:
        return self.records.live

    # -- cutting

    def shard_module(self, module: nn.Module, name: str = "") -> None:
        """Shard the parameters that ``module`` itself owns and that are not sharded yet. Collective."""
        own = [(key, param) for key, param in module._parameters.items() if param is not None]
        if not own or all(self.find(param) and is_sharded(module) for _, param in own):
            return
        check_module(name, module)
        if any(param.is_meta and not self.find(param) for _, param in own):
            own = self._materializer.values(module, name)
        for key, param in own:
            record = self.find(param)
            if record is None:
                record = self._shard_parameter(
                    f"{name}.{key}" if name else key, param, self._formats.get((id(module), key))
                )
                module._parameters[key] = record.param
            self.attach(module, key, record)

    def attach(self, module: nn.Module, key: str, record: ShardedParameter) -> None:
        """Make ``module``'s parameter ``key`` read ``record``."""
        before = self._read.get((id(module), key))
        if before is not None:  # of this module, or of a deleted one with the same id
            before.owners = [(m, k) for m, k in before.owners if not (m is module and k == key)]
        self._read[id(module), key] = record
        record.owners.append((module, key))
        module.__dict__.setdefault(SHAPES, {})[key] = tuple(record.shape)
        if record.format is not None:
            module.__dict__.setdefault(FORMATS, {})[key] = (record.format.kind, record.format.dtype)
        if record.layout.order is not None:
            module.__dict__.setdefault(ORDERS, {})[key] = record.layout.order
        self._install_class(module)

    def _install_class(self, module: nn.Module) -> None:
        self.classes.install_class(module, tuple(sorted(module.__dict__[SHAPES])))

    def _shard_parameter(self, name: str, param: nn.Parameter, packed: WeightFormat | None = None) -> ShardedParameter:
        check_parameter(name, param)
        noted = self._aliases.snapshot_memory(param)
        if packed is not None:
            record = self._pack(name, param, packed, lambda: param.detach().to(self.mesh.device))
            self._aliases.register(noted, record)
            return record
        layout = ShardLayout.from_shape(
            param.shape, param.dtype, self.mesh.shard_group.size, memory_order(param), self._state_blocks
        )
        if self.mesh.rank > 0 and layout.numel:
            # The broadcast overwrites this rank's values, so copying them to the device would be wasted time.
            full = torch.empty(layout.memory_shape, dtype=param.dtype, device=self.mesh.device)
        else:
            full = (
                layout.permute_to_memory(param.detach().to(self.mesh.device)).resolve_conj().resolve_neg().contiguous()
            )
        if self.mesh.world_size > 1 and layout.numel:
            dist.broadcast(as_real(full), group=self.mesh.gather_group, group_src=0)
        shard = layout.part(layout.permute_from_memory(full), self.mesh.shard_index)
        record = self._register(name, param, shard.view(-1), layout)
        self._aliases.register(noted, record)
        return record

    def _pack(
        self, name: str, param: nn.Parameter, packed: WeightFormat, values: Callable[[], Tensor]
    ) -> ShardedParameter:
        """Shard the packed words of rank 0's values."""
        layout = ShardLayout.from_shape(torch.Size([packed.words]), torch.int32, self.mesh.shard_group.size)
        if self.mesh.rank == 0:
            words = packed.encode(values())
        else:
            words = torch.empty(packed.words, dtype=torch.int32, device=self.mesh.device)
        if self.mesh.world_size > 1:
            dist.broadcast(words, group=self.mesh.gather_group, group_src=0)
        return self._register(name, param, layout.part(words, self.mesh.shard_index), layout, packed)

    def _pack_sharded(self) -> None:
        """Replace the values of selected weights that were sharded while the model was built. Collective."""
        for record in self.live:
            module, key = record.owners[0]
            packed = self._formats.get((id(module), key))
            if packed is None or record.format is not None:
                continue
            full = gather_full(record)
            self._replace(record, partial(self._pack, record.name, record.param, packed, lambda full=full: full))  # type: ignore[misc]

    def _replace(self, record: ShardedParameter, make: Callable[[], ShardedParameter]) -> None:
        """Let another record of the same parameter, made without the old shard, replace this one."""
        self.executor.parameters.drop(record.index)
        owners, record.owners, record.dropped = record.owners, [], True
        ShardSpec.unwrap(record.param)
        record.shard.untyped_storage().resize_(0)
        other = make()
        other.copied = record.copied
        for module, key in owners:
            self.attach(module, key, other)

    def _cast(self, param: nn.Parameter, full: Tensor) -> None:
        """Give a parameter of a model that is being built a value of another dtype."""
        record = self.find(param)
        assert record is not None
        self.sync.before_overwriting()
        layout = ShardLayout.from_shape(
            record.shape, full.dtype, self.mesh.shard_group.size, record.layout.order, self._state_blocks
        )
        shard = layout.part(full, self.mesh.shard_index).view(-1)
        self._replace(record, partial(self._register, record.name, param, shard, layout))

    def clone(self, record: ShardedParameter) -> ShardedParameter:
        """Return a new parameter of the same values that no module reads yet."""
        record.copied = True
        shard = record.shard.clone()
        param = nn.Parameter(shard.view(record.layout.visible_shape), record.param.requires_grad)
        return self._register(record.name, param, shard, record.layout)

    def _register(
        self, name: str, param: nn.Parameter, shard: Tensor, layout: ShardLayout, packed: WeightFormat | None = None
    ) -> ShardedParameter:
        index = self.executor.parameters.add(name, param, shard, layout.shape, layout.order)
        device = self.mesh.device
        spec = ShardSpec(
            name,
            layout,
            self.mesh.shard_index,
            device,
            weakref.ref(self.mesh.shard_group.gather_group),
            partial(_before_write, weakref.ref(self)),
            partial(_run_collective, weakref.ref(self), name),
            packed=None if packed is None else packed.kind,
            on_read=partial(_before_read, weakref.ref(self)),
            on_cast=partial(_cast, weakref.ref(self), weakref.ref(param)),
        )
        record = ShardedParameter(index, name, param, layout, {Role.MASTER_SHARD: shard}, spec, format=packed)
        record.install_shard()
        self.records.add(record)
        return record

    # -- finishing

    def finish(self, root: nn.Module) -> None:
        """Shard every other parameter in ``root`` and move all shards into flat buffers. Collective.

        Raises:
            UnsupportedError: a parameter cannot be sharded; no parameter is sharded then.
        """
        check_same_model(root, self.mesh)
        # Check everything before sharding anything, so that a rejected module stays unchanged.
        for name, module in root.named_modules():
            check_module(name, module)
            for key, param in module._parameters.items():
                if param is not None and self.find(param) is None:
                    self.classes.check(module)
                    check_parameter(f"{name}.{key}" if name else key, param)
        self._formats = {} if self._frozen is None else self._frozen.find(root)
        if self._formats and self.mesh.rank == 0:
            warn_of_rest(root, self._formats)
        check_shared_memory(
            {name: param for name, param in root.named_parameters() if self.find(param) is None},
            dict(root.named_buffers()),
        )
        self._pack_sharded()
        for name, module in root.named_modules():
            for key, param in list(module._parameters.items()):
                if param is not None:
                    module._parameters[key] = self._materializer.latest(param)
            self.shard_module(module, name)
            self._move_buffers(module, name)
        self._materializer.forget()
        for module in mark_adapted_parameters(root):
            if is_sharded(module):
                self._install_class(module)
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
        # Gradients arrive in reverse order of registration, so a bucket's shards are contiguous.
        for record in self.records:
            record.spec.on_cast = None
            if not record.owners and not record.dropped:
                self.executor.parameters.drop(record.index)
        self.memory.place_shards(self.live[::-1])


def _before_write(sharder: weakref.ref[Sharder], all_of_it: bool) -> None:
    known = sharder()
    if known is not None:
        # The assigned values win over pending writes to weights that were gathered before.
        known.sync.before_overwriting() if all_of_it else known.sync.before_writing()


def _before_read(sharder: weakref.ref[Sharder]) -> None:
    known = sharder()
    if known is not None:
        known.sync.before_reading()


def _cast(sharder: weakref.ref[Sharder], param: weakref.ref[nn.Parameter], full: Tensor) -> None:
    known, own = sharder(), param()
    assert known is not None
    assert own is not None
    known._cast(own, full)


def _run_collective(sharder: weakref.ref[Sharder], name: str, start: Callable[[bool], dist.Work | None]) -> None:
    known = sharder()
    if known is None:
        raise UnsupportedError(closed_engine_message(name))
    known.executor.collective(f"a reduction over all of {name!r}, such as its norm", SequenceId.GATHER, start)


def explain_shard_error(error: BaseException, root: nn.Module, sharder: Sharder) -> None:
    """Add a note to an error that a sharded module's parameters have caused.

    The note names the parameters that were replaced since ``root`` was sharded. For assigning or freezing a gathered
    weight, which is a plain tensor, it gives the line to write instead.
    """
    line = ""
    if isinstance(error, ValueError) and "is no shard of a live engine" in str(error):
        names = [
            f"{name}.{key}" if name else key
            for name, module in root.named_modules()
            if is_sharded(module)
            for key, shape in module.__dict__[SHAPES].items()
            if shape is not None and (param := module._parameters.get(key)) is not None and sharder.find(param) is None
        ]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            line = f"replaced since the model was sharded: {', '.join(map(repr, names[:4]))}{more}."
    elif isinstance(error, TypeError) and re.search("cannot assign .*Tensor' as parameter", str(error)):
        line = (
            "module.weight of a sharded module is a plain tensor with the full value. Tie weights "
            "before the model is sharded (in __init__(), configure_model() or setup()); to change a value, write "
            "`module.weight.data = value`."
        )
    elif isinstance(error, RuntimeError) and "only change requires_grad flags of leaf" in str(error):
        line = (
            "in a training step, module.weight of a sharded module is computed from its shards. Set requires_grad of "
            "the parameters, by module.requires_grad_(False) or on what module.parameters() returns."
        )
    if line and line not in str(getattr(error, "__notes__", ())):
        error.add_note(f"lightning_zero: {line}")
