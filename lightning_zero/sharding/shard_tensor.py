"""Shards in sight: what users hold when they touch ``param``, ``param.data`` and ``param.grad``.

One rule, wherever it happens: elementwise code runs on the shard as it is; a reduction over all elements gives what a
plain module gives, by one collective that every rank must take part in; everything that depends on the whole
parameter's shape raises :class:`UnsupportedError` with the line to write instead. Results of elementwise code are
shards again, so the rule follows them: ``(p.grad + 0.1 * p).norm()`` is the whole's norm.

The tensors stay what they are; only their Python class is another, whose ``__torch_function__`` asks
``sharding/rules.py``. Our own code works on the plain tensors below, or inside :func:`no_shard_dispatch`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.argument_checks import BROADCAST, TENSOR
from lightning_zero.compat.tensors import rebuild_parameter
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.operands import gather_value, is_shard, shards_in
from lightning_zero.sharding.rules import no_shard_dispatch, rule_of
from lightning_zero.sharding.unsupported import raise_unsupported_for

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout

__all__ = ["ShardParameter", "ShardTensor", "ShardSpec", "full_arguments"]


@dataclass(eq=False)
class ShardSpec:
    """What a shard in sight knows of its parameter. It keeps neither parameter nor engine nor process group alive: the
    executor holds parameters, and a way back from these would keep all forever.

    Attributes:
        number: of the shard, among those of its parameter.
        changing: called when the parameter is about to be given other values; with True when all are.
        collective: starts one over ``group``, see :meth:`Executor.collective`, and waits for it.
        memory: address of the storage that its values lie in.
    """

    name: str
    layout: ShardLayout
    number: int
    device: torch.device
    group: Callable[[], dist.ProcessGroup | None]
    changing: Callable[[bool], None]
    collective: Callable[[Callable[[bool], dist.Work | None]], None]
    memory: int = 0
    _given: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

    def wrap(self, tensor: Tensor) -> Tensor:
        """Makes ``tensor``, with a value for each element of the shard, follow the rule; returns the same object."""
        if type(tensor) is Tensor or type(tensor) is ShardTensor:
            tensor.__class__ = ShardTensor
        elif type(tensor) is nn.Parameter or type(tensor) is ShardParameter:
            tensor.__class__ = ShardParameter
        else:
            return tensor  # a class with rules of its own
        tensor.__dict__["_zero_spec"] = self
        return tensor

    def wrap_alias(self, tensor: Tensor) -> Tensor:
        """Show ``tensor``; if it is another name of the shard's memory, let :meth:`assign` find it. Call plainly."""
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() == self.memory:
            self._given = [ref for ref in self._given if ref() is not None] if len(self._given) > 8 else self._given
            self._given.append(weakref.ref(tensor))
        return self.wrap(tensor)

    def _leave_values(self) -> None:
        """Give other names of the shard's memory a copy: ``param.data = x`` leaves the values to who has read them."""
        given = [tensor for ref in self._given if (tensor := ref()) is not None]
        given = [tensor for tensor in given if tensor.untyped_storage().data_ptr() == self.memory]
        self._given = []
        copy = given[0].detach().as_subclass(Tensor).reshape(-1).clone() if given else None
        for tensor in given:
            assert copy is not None
            if tensor.numel() == copy.numel() and tensor.dtype == copy.dtype:
                tensor.data = copy.view(tensor.shape)

    def clear_padding(self, tensor: Tensor) -> None:
        """Padding is zero, whatever was written: norms over arenas count it."""
        begin, end = self.layout.shard_range(self.number)
        # A view that was made without gradients must not be asked for its function.
        plain = not torch.is_grad_enabled() or tensor.grad_fn is None
        if end - begin < self.layout.shard_numel and plain:
            with no_shard_dispatch(), torch.no_grad():
                tensor.detach().view(-1)[end - begin :].zero_()

    def write(self, tensor: Tensor) -> None:
        """``tensor`` is about to be written to."""
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == self.memory:
            self.changing(False)

    def assign(self, tensor: Tensor, value: Any) -> None:
        """``tensor.data = value``: copied to where gathers and optimizer steps see it.

        Raises:
            UnsupportedError: the value has not the shard's shape, dtype and device.
        """
        with no_shard_dispatch(), torch.no_grad():
            if isinstance(value, Tensor) and value.shape != tensor.shape and value.shape == self.layout.shape:
                value = self.layout.part(value, self.number)
            given = isinstance(value, Tensor) and (value.shape, value.dtype, value.device)
            if given != (tensor.shape, tensor.dtype, tensor.device):
                what = f"shape {tuple(given[0])}, {given[1]}, {given[2]}" if given else type(value).__name__
                own = self.name.rpartition(".")[2]
                raise UnsupportedError(
                    f"The .data of {self.name!r} was given another tensor ({what}), but it is this rank's shard (shape "
                    f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}). Assign whole values to the module that "
                    f"owns it, on every rank: `module.{own}.data = x`. To change dtypes or devices, call "
                    "lightning_zero.unshard(module)."
                )
            if type(tensor) is ShardParameter:
                self.changing(True)
            if value.data_ptr() != tensor.data_ptr():
                if type(tensor) is ShardParameter:
                    self._leave_values()
                tensor.copy_(value)
            self.clear_padding(tensor)

    @staticmethod
    def unwrap(tensor: Tensor) -> None:
        """Gives what :meth:`wrap` has shown its own class back."""
        if isinstance(tensor, _ShardMethods):
            tensor.__class__ = nn.Parameter if type(tensor) is ShardParameter else Tensor  # type: ignore[assignment]
            del tensor.__dict__["_zero_spec"]


def _part(name: str) -> Any:
    """Return the property for the real or the imaginary part. torch's own setter asks no ``__torch_function__``."""
    whole: Any = getattr(Tensor, name)

    def write(shard: Tensor, value: Any) -> None:
        part = whole.__get__(shard)
        part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)

    return property(whole.__get__, write)


class _ShardMethods:
    _zero_spec: ShardSpec
    real, imag = _part("real"), _part("imag")

    # Inside compiled code, too: Dynamo would compile what the rules do, whose graphs ask the rules again, without end.
    def to_local(self) -> Tensor:
        """Return a copy of the elements that this rank holds: 1-D, without padding, in the parameter's memory order.

        ``param.to_local()`` has ``numel()`` elements over all ranks together.
        """
        begin, end = self._zero_spec.layout.shard_range(self._zero_spec.number)
        with no_shard_dispatch():
            return cast(Tensor, self).detach().as_subclass(Tensor).reshape(-1)[: end - begin].clone()

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # asks no __torch_function__
        return raise_unsupported_for(Tensor.set_, self._zero_spec)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rule_of(func)(func, args, kwargs or {})


class ShardTensor(_ShardMethods, Tensor):
    """A value for each element of a shard, in the shard's shape or 1-D: a gradient, ``param.data``, or what was
    computed of these one by one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with no_shard_dispatch():
            memo[id(self)] = copy = self._zero_spec.wrap(self.detach().clone())
            return copy.requires_grad_(self.requires_grad)

    def __copy__(self) -> Tensor:
        with no_shard_dispatch():
            return self._zero_spec.wrap(self.detach()).requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full value as a plain tensor. Collective."""
        return gather_value(self).__reduce_ex__(protocol)


class ShardParameter(_ShardMethods, nn.Parameter):
    """The registered parameter while its data is a shard."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with no_shard_dispatch():
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = self._zero_spec.wrap(copy)
        return copy

    def __copy__(self) -> Tensor:
        with no_shard_dispatch():
            return self._zero_spec.wrap(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full value as an ``nn.Parameter``. Collective."""
        return rebuild_parameter, (gather_value(self), self.requires_grad, OrderedDict())


def full_arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a function that takes a tensor's memory as it is. Collective where a shard is copied.

    Raises:
        UnsupportedError: a shard among them, of which the function would make an alias.
    """
    # Elements of a list that torch.tensor() reads are asked for their numbers.
    shards = shards_in(args if name == BROADCAST else [v for v in args if isinstance(v, Tensor)])
    first = next(shards, None)
    if first is None:
        return args
    if name == TENSOR:
        return tuple(gather_value(value) if is_shard(value) else value for value in args)
    return raise_unsupported_for(SimpleNamespace(__name__=name), first.__dict__["_zero_spec"])
