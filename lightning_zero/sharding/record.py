"""What is known of one sharded parameter: its cut, its memory by what it is for, and who reads it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.shard_tensor import ShardSpec
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["Records", "Role", "ShardedParameter"]


class Role(Enum):
    """What memory that belongs to a parameter is for. All of it is allocated in ``sharding/memory.py``, which says when
    and in which dtype, and lives as long as the engine."""

    MASTER_SHARD = "master shard"
    GRADIENT = "gradient"
    DEFERRED_GRADIENT = "deferred gradient"
    COMPUTE_SHARD = "compute copy"
    FULL_PRECISION_SHARD = "full-precision copy"
    UNSHARDED_CACHE = "resident weight"


@dataclass
class ShardedParameter:
    """One parameter, whole on no rank.

    Attributes:
        index: its number with the executor.
        name: in the module that was sharded.
        param: what is registered in modules: a view of the shard, or for a while the whole value.
        layout: how it is cut.
        memory: on this rank, by what it is for; what is missing has not been allocated.
        owners: the (module, name) pairs that read it: several when it is tied, none when it is dropped.
        copied: by a module that may have been no more than a pattern.
        visible_grad: the object that is ``param.grad`` once a backward has brought one.
        on_host: the shard as the host sees it, where it lies in the host's memory.
        _aliases: tensors that shared the parameter's memory before it was sharded, see ``sharding/aliases.py``.
    """

    index: int
    name: str
    param: nn.Parameter
    layout: ShardLayout
    memory: dict[Role, Tensor]
    spec: ShardSpec = field(repr=False)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    copied: bool = False
    visible_grad: Tensor | None = None
    on_host: Tensor | None = None
    _aliases: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

    @property
    def shard(self) -> Tensor:
        """This rank's elements and padding, 1-D, in the parameter's dtype: what optimizers step."""
        return self.memory[Role.MASTER_SHARD]

    @property
    def is_on_host(self) -> bool:
        """Whether the shard lies in the host's memory."""
        return self.on_host is not None

    @property
    def gradient(self) -> Tensor | None:
        """Memory for the shard's gradient, 1-D, in the shard's dtype, unless it is that of the compute copy; None until
        training begins, and for parameters that are not trained."""
        return self.memory.get(Role.GRADIENT)

    @property
    def grad_aliases_compute_shard(self) -> bool:
        """Whether it is: until the optimizer has stepped, it is where the compute copy was."""
        return self.gradient is not None and self.gradient is self.memory.get(Role.COMPUTE_SHARD)

    def has_shard_shape(self, value: Any) -> bool:
        """Whether ``value`` has the shape in which users see the shard, as elementwise state of optimizers has."""
        return isinstance(value, Tensor) and value.shape == self.layout.visible_shape

    def local_part(self, whole: Tensor) -> Tensor:
        """This rank's elements of a value of the whole parameter's shape, as users see a shard: on the value's device
        and in its dtype, padded with zeros."""
        return self.layout.part(whole, self.spec.number)

    def write_local_part(self, whole: Tensor, into: Tensor) -> None:
        """The same into memory that there is: 1-D, of the shard's size, any device and dtype."""
        self.layout.write(into, whole, self.spec.number)

    def install_shard(self) -> None:
        """Points the visible parameter at the shard. It goes on counting the whole parameter's elements: that is what
        ``sum(p.numel() for p in model.parameters())`` and Lightning's model summary are for."""
        with no_shard_dispatch():
            for tensor in self._names():
                tensor.data = self.shard.view(self.layout.visible_shape)
            self.spec.memory = self.shard.untyped_storage().data_ptr()
        self.param.__dict__["numel"] = self.param.__dict__["nelement"] = partial(int, self.layout.numel)
        for tensor in self._names():
            self.spec.wrap(tensor)

    def install_full(self, value: Tensor) -> None:
        """Makes the visible parameter an ordinary one with this value."""
        if self.grad_aliases_compute_shard:
            with no_shard_dispatch():
                self.param.grad, self.param.grad_dtype = None, value.dtype
        self.set_full_data(value)
        for name in ("numel", "nelement"):
            self.param.__dict__.pop(name, None)

    def set_full_data(self, full: Tensor) -> None:
        """Point the parameter at its full value; gradients and counts of elements stay as they are."""
        for tensor in self._names():
            ShardSpec.unwrap(tensor)
        for tensor in self._names():
            tensor.data = full

    def add_alias(self, tensor: Tensor) -> None:
        """Make a tensor of the parameter's former memory another name of it."""
        self._aliases.append(weakref.ref(tensor))
        self.install_shard()

    def _names(self) -> list[Tensor]:
        return [self.param, *(tensor for alias in self._aliases if (tensor := alias()) is not None)]


class Records:
    """All sharded parameters of one engine, in the order of their registration, which is that of their indices."""

    def __init__(self) -> None:
        self._all: list[ShardedParameter] = []
        self._by_param: dict[int, ShardedParameter] = {}

    def add(self, record: ShardedParameter) -> None:
        """The next one: its index is the number of those before."""
        self._all.append(record)
        self._by_param[id(record.param)] = record

    def find(self, param: Tensor) -> ShardedParameter | None:
        """The record of a visible parameter, or None."""
        record = self._by_param.get(id(param))
        return record if record is not None and record.param is param else None

    @property
    def live(self) -> list[ShardedParameter]:
        """Those that some module reads."""
        return [record for record in self._all if record.owners]

    def __getitem__(self, index: int) -> ShardedParameter:
        return self._all[index]

    def __iter__(self) -> Iterator[ShardedParameter]:
        return iter(self._all)
