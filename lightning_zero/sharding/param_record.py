"""Record each sharded parameter's layout, memory by role, and owners."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sharding.layout import ShardLayout, whole_layout
from lightning_zero.sharding.shard_tensor import ShardSpec, no_shard_dispatch
from lightning_zero.sharding.weight_format import WeightFormat


class Role(Enum):
    """Name the purpose of memory that belongs to a parameter; ``sharding/flat_memory.py`` allocates it."""

    MASTER_SHARD = "master shard"  # the parameter's dtype; after sharding, and again by group_shards()
    GRADIENT = "gradient"  # the parameter's dtype, in the first training step; or an alias of the compute shard
    DEFERRED_GRADIENT = "deferred gradient"  # float32 or wider; full or of a host shard, freed if that changes
    COMPUTE_SHARD = "compute shard"  # the compute dtype, in the first step of mixed precision
    FP8_SHARD = "fp8 shard"  # after the first step that gathers the weight in fp8
    FULL_PRECISION_SHARD = "full-precision shard"  # in symmetric memory, for parameters that autocast does not cast
    UNSHARDED_CACHE = "unsharded cache"  # the compute dtype; freed if its budget changes


@dataclass
class ShardedParameter:
    """Hold the state of one sharded parameter.

    Attributes:
        index: the parameter's number in the executor.
        param: the registered parameter: a view of the shard, or the full value inside ``full_parameters``.
        memory: tensors on this rank, by role; a missing role is not allocated yet.
        spec: what the parameter's shard tensors refer to.
        owners: the (module, name) pairs that read the parameter: several if it is tied, none after it is dropped.
        format: how the frozen weight is packed; None if the shard holds values. ``layout`` is that of the packed words.
        copied: True if a module was deep-copied from the owner, which may have been only a template.
        dropped: True if another record has replaced this one.
        visible_grad: the object that is ``param.grad`` after a backward.
        on_host: the shard as a CPU tensor, if it is stored in host memory.
        _aliases: tensors that shared the parameter's memory before it was sharded, see ``sharding/aliases.py``.
    """

    index: int
    name: str
    param: nn.Parameter
    layout: ShardLayout
    memory: dict[Role, Tensor]
    spec: ShardSpec = field(repr=False)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    format: WeightFormat | None = None
    copied: bool = False
    dropped: bool = False
    visible_grad: Tensor | None = None
    on_host: Tensor | None = None
    _aliases: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

    @property
    def shard(self) -> Tensor:
        """Return this rank's elements and padding, 1-D, which optimizers step."""
        return self.memory[Role.MASTER_SHARD]

    @property
    def unsharded(self) -> Tensor | None:
        """Return a 1-D view of the full parameter in memory order; None if other ranks hold parts of it."""
        return self.shard[: self.layout.numel] if self.layout.world_size == 1 else None

    @property
    def shape(self) -> torch.Size:
        """Return the full parameter's shape."""
        return self.layout.shape if self.format is None else self.format.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which modules read the parameter outside autocast."""
        return self.param.dtype if self.format is None else self.format.dtype

    @property
    def is_full(self) -> bool:
        """Return True if the registered parameter is the full value. Call it inside ``no_shard_dispatch``."""
        other = self.param.data_ptr() != self.shard.data_ptr()
        return other and (self.format is not None or self.param.shape == self.layout.shape)

    @property
    def is_on_host(self) -> bool:
        """Return True if the shard is stored in host memory."""
        return self.on_host is not None

    @property
    def gradient(self) -> Tensor | None:
        """Return the memory of the shard's gradient: 1-D, in the shard's dtype.

        It has the compute shard's dtype if it aliases that. None until training begins, and for frozen parameters.
        """
        return self.memory.get(Role.GRADIENT)

    @property
    def grad_aliases_compute_shard(self) -> bool:
        """Return True if the gradient is stored in the compute shard's memory until the optimizer has stepped."""
        return self.gradient is not None and self.gradient is self.memory.get(Role.COMPUTE_SHARD)

    def has_shard_shape(self, value: Any) -> bool:
        """Return True if ``value`` has the shard's visible shape, as an optimizer's elementwise state has."""
        return isinstance(value, Tensor) and value.shape == self.layout.visible_shape

    def local_part(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, in the visible shape, as a new tensor.

        It is padded with zeros.
        """
        shard = torch.empty(self.layout.shard_numel, dtype=self._stored_dtype(full), device=self._stored_device(full))
        self.write_local_part(full, shard)
        return shard.view(self.layout.visible_shape)

    def write_local_part(self, full: Tensor, into: Tensor) -> None:
        """Write this rank's part of a tensor of the full shape into the 1-D ``into``, of any device and dtype."""
        self.layout.write(into, full if self.format is None else self._packed(full), self.spec.shard_index)

    def _stored_dtype(self, full: Tensor) -> torch.dtype:
        return full.dtype if self.format is None else torch.int32

    def _stored_device(self, full: Tensor) -> torch.device:
        return full.device if self.format is None else self.shard.device

    def _packed(self, full: Tensor) -> Tensor:
        assert self.format is not None
        # A tensor of a checkpoint file is read whole, because blocks do not end where shards do.
        flat = torch.empty(self.format.shape.numel(), dtype=full.dtype, device=self.shard.device)
        whole_layout(self.format.shape).write(flat, full, 0)
        return self.format.encode(flat.view(self.format.shape))

    def install_shard(self) -> None:
        """Point the registered parameter at the shard.

        ``numel()`` goes on returning the full parameter's number of elements, which ``sum(p.numel() for p in
        model.parameters())`` and Lightning's model summary need.
        """
        with no_shard_dispatch():
            for tensor in self._tensors():
                tensor.data = self.shard.view(self.layout.visible_shape)
            self.spec.storage_address = self.shard.untyped_storage().data_ptr()
        self.param.__dict__["numel"] = self.param.__dict__["nelement"] = partial(int, self.shape.numel())
        for tensor in self._tensors():
            self.spec.wrap(tensor)

    def install_full(self, value: Tensor) -> None:
        """Make the registered parameter a plain one with this full value."""
        if self.grad_aliases_compute_shard:
            with no_shard_dispatch():
                self.param.grad, self.param.grad_dtype = None, value.dtype
        self.set_full_data(value)
        for name in ("numel", "nelement"):
            self.param.__dict__.pop(name, None)

    def set_full_data(self, full: Tensor) -> None:
        """Point the parameter at its full value; its gradient and its ``numel`` stay as they are."""
        for tensor in self._tensors():
            ShardSpec.unwrap(tensor)
        for tensor in self._tensors():
            tensor.data = full

    def add_alias(self, tensor: Tensor) -> None:
        """Make a tensor of the parameter's former memory an alias of the shard."""
        self._aliases.append(weakref.ref(tensor))
        self.install_shard()

    def _tensors(self) -> list[Tensor]:
        return [self.param, *(tensor for alias in self._aliases if (tensor := alias()) is not None)]


def gather_full(record: ShardedParameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the full parameter on the shard's device, in its own dtype or another, detached. Collective."""
    shape = list(record.layout.memory_shape)
    with torch.no_grad(), no_shard_dispatch():
        if record.format is not None:
            packed = record.unsharded
            if packed is None:
                packed = torch.ops.lightning_zero.gather(record.param, shape, torch.int32)
            return record.format.decode(packed, dtype)
        dtype = dtype or record.param.dtype
        return record.layout.permute_from_memory(torch.ops.lightning_zero.gather(record.param, shape, dtype))


class Records:
    """Hold the records of all sharded parameters of one engine, ordered by index."""

    def __init__(self) -> None:
        self._all: list[ShardedParameter] = []
        self._by_param: dict[int, ShardedParameter] = {}

    def add(self, record: ShardedParameter) -> None:
        """Append a record, whose index is the number of records before it."""
        self._all.append(record)
        self._by_param[id(record.param)] = record

    def find(self, param: Tensor) -> ShardedParameter | None:
        record = self._by_param.get(id(param))
        return record if record is not None and record.param is param else None

    @property
    def live(self) -> list[ShardedParameter]:
        """Return the records that some module reads."""
        return [record for record in self._all if record.owners]

    def __getitem__(self, index: int) -> ShardedParameter:
        return self._all[index]

    def __iter__(self) -> Iterator[ShardedParameter]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
