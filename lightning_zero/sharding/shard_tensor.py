"""What cannot be done to one rank's shard, and the line to write instead.

---

Bring the operands of an elementwise function on shards to one layout.

Two parameters of one shape can be cut differently: memory order (channels_last) and dtype decide where a cut falls. A
plain tensor has the shape of the full parameter, or broadcasts to it. Each operand is replaced by the elements that
belong to this rank's part of the target, so that the function gives what it gives on full tensors.


---

Shards in sight: what users hold when they touch ``param``, ``param.data`` and ``param.grad``.

One rule, wherever it happens: elementwise code runs on the shard as it is; a reduction over all elements gives what a
plain module gives, by one collective that every rank must take part in; everything that depends on the whole
parameter's shape raises :class:`UnsupportedError` with the line to write instead. Results of elementwise code are
shards again, so the rule follows them: ``(p.grad + 0.1 * p).norm()`` is the whole's norm.

The tensors stay what they are; only their Python class is another, whose ``__torch_function__`` asks
``sharding/shard_rules.py``. Our own code works on the plain tensors below, or inside :func:`no_shard_dispatch`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.argument_checks import BROADCAST, TENSOR
from lightning_zero.compat.tensors import DisableTorchFunctionSubclass, rebuild_parameter
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import as_real
from lightning_zero.sharding.shard_rules import no_shard_dispatch, rule_of

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout

__all__ = [
    "Mismatch",
    "ShardParameter",
    "ShardSpec",
    "ShardTensor",
    "align",
    "all_gather_shards",
    "closed_engine_message",
    "full_arguments",
    "gather_value",
    "is_shard",
    "no_shard_dispatch",
    "raise_unsupported",
    "raise_unsupported_for",
    "shards_in",
    "spec_of",
    "without_shard_dispatch",
]

P = ParamSpec("P")
R = TypeVar("R")


def no_shard_dispatch() -> AbstractContextManager[None]:
    """Inside, shards in sight are ordinary tensors, and as quick; what is computed of them is out of sight."""
    return DisableTorchFunctionSubclass()


def without_shard_dispatch(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs :func:`no_shard_dispatch`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_shard_dispatch():
            return function(*args, **kwargs)

    return run


def spec_of(args: Iterable[Any]) -> ShardSpec:
    """The sight of the first shard among these, or in lists among them."""
    for value in args:
        if isinstance(value, Tensor):
            if "_zero_spec" in value.__dict__:
                return value.__dict__["_zero_spec"]
        elif isinstance(value, tuple | list):
            try:
                return spec_of(value)
            except LookupError:
                continue
    raise LookupError("no shard")


def raise_unsupported(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    """Raises :class:`UnsupportedError` for a function that needs more than one rank's elements."""
    raise_unsupported_for(func, spec_of((*args, *kwargs.values())))


def raise_unsupported_for(func: Any, spec: ShardSpec) -> NoReturn:
    """Likewise, of the shards in this sight."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f".{func.__self__.__name__}"
    own = spec.name.rpartition(".")[2]
    raise UnsupportedError(
        f"{name} was asked of this rank's shard of {spec.name!r} (shape {tuple(spec.layout.visible_shape)} of "
        f"{tuple(spec.layout.shape)}), as param, param.data and param.grad are, and would give another result on "
        f"each rank. Read the whole parameter from the module that owns it, `module.{own}`; or put "
        "whole parameters in place for a while: `with lightning_zero.full_parameters(module): ...`. "
        "Do so on every rank. Elementwise functions, and norms, sums, means and extrema over all elements, work here; "
        "param.to_local() copies this rank's elements."
    )


class Mismatch(Exception):
    """The operands do not fit one shard's layout; callers raise the error that names function and parameter."""


def is_shard(value: Any) -> bool:
    """Return True for a tensor that holds this rank's part of a parameter, or was computed from one elementwise."""
    return isinstance(value, Tensor) and "_zero_spec" in value.__dict__


def shards_in(values: Any) -> Iterator[Tensor]:
    """Yield the shards among these values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from shards_in(value)
        elif is_shard(value):
            yield value


def closed_engine_message(name: str) -> str:
    """Return the message for a shard whose engine is closed."""
    return (
        f"The engine that sharded {name!r} is gone, and with it the other ranks' parts of what is reduced here. Take "
        "norms, sums and the like before the strategy is closed, or of whole values."
    )


def all_gather_shards(own: Tensor, spec: ShardSpec) -> Tensor:
    """All-gather a tensor of one shape and dtype from each rank. Collective.

    Returns:
        Shape [ranks, *own.shape], on the device of ``own``.

    Raises:
        UnsupportedError: the engine is closed.
    """
    if spec.layout.world_size == 1:
        return own[None]
    group = spec.group()
    if group is None:
        raise UnsupportedError(closed_engine_message(spec.name))
    sent = as_real(own.to(spec.device).contiguous())  # gloo has no collectives of complex numbers
    received = torch.empty((spec.layout.world_size, *sent.shape), dtype=sent.dtype, device=sent.device)
    spec.collective(lambda later: dist.all_gather([*received.unbind()], sent, group=group, async_op=later))
    received = received.to(own.device)
    return torch.view_as_complex(received) if own.is_complex() else received


def gather_value(shard: Tensor) -> Tensor:
    """Return the full value of a shard: a plain tensor in the parameter's shape and memory order. Collective."""
    spec: ShardSpec = shard.__dict__["_zero_spec"]
    with no_shard_dispatch(), torch.no_grad():
        # As bytes: gloo has no collectives for some dtypes.
        own = shard.detach().reshape(-1).resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        flat = all_gather_shards(own, spec).view(-1).view(shard.dtype)
        return spec.layout.full_view(flat)


def align(values: list[Any], target: Tensor) -> list[Any]:
    """Return the operands as parts of one layout, that of the shard ``target``; numbers and the like stay.

    Collective if a shard among them is cut in another way.

    Raises:
        Mismatch: an operand does not broadcast to the parameter's shape.
    """
    spec: ShardSpec = target.__dict__["_zero_spec"]
    with no_shard_dispatch():
        flat = target.dim() == 1 and len(spec.layout.shape) > 1
        return [_aligned(value, spec, flat) if isinstance(value, Tensor) else value for value in values]


def _aligned(value: Tensor, spec: ShardSpec, flat: bool) -> Tensor:
    layout = spec.layout
    theirs: ShardSpec | None = value.__dict__.get("_zero_spec")
    if theirs is not None:
        if theirs.layout == layout:
            return value
        full = gather_value(value)
        if flat and full.shape == layout.shape:
            full = full.reshape(-1)
    elif value.numel() == 1 and value.dim() <= max(1, len(layout.shape)) or _is_local(value, layout):
        return value
    else:
        full = value.detach() if value.requires_grad else value
    return _part(full, spec, flat)


def _is_local(value: Tensor, layout: ShardLayout) -> bool:
    """Return True for what has one element for each of the shard's, as an optimizer's state.

    If the last dimension is as long as a shard, such a tensor could also be one to broadcast. Then each rank has one
    row, and both readings agree, unless memory has another order than the dimensions.
    """
    if value.shape != layout.visible_shape and value.shape != (layout.shard_numel,):
        return False
    return layout.order is None or layout.shape[-1] != layout.shard_numel


def _part(full: Tensor, spec: ShardSpec, flat: bool) -> Tensor:
    layout = spec.layout
    try:
        if flat:
            full = full.expand(layout.numel).reshape(layout.shape)
        part = layout.part(full.expand(layout.shape), spec.number)
    except RuntimeError as error:
        raise Mismatch from error
    return part.view(-1) if flat else part


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
    on_write: Callable[[bool], None]
    collective: Callable[[Callable[[bool], dist.Work | None]], None]
    storage_address: int = 0
    _aliases: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

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
        """Show ``tensor``; if it is another name of the shard's memory, let :meth:`assign_data` find it. Call plainly."""
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() == self.storage_address:
            self._aliases = (
                [ref for ref in self._aliases if ref() is not None] if len(self._aliases) > 8 else self._aliases
            )
            self._aliases.append(weakref.ref(tensor))
        return self.wrap(tensor)

    def _detach_aliases(self) -> None:
        """Give other names of the shard's memory a copy: ``param.data = x`` leaves the values to who has read them."""
        given = [tensor for ref in self._aliases if (tensor := ref()) is not None]
        given = [tensor for tensor in given if tensor.untyped_storage().data_ptr() == self.storage_address]
        self._aliases = []
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

    def before_write(self, tensor: Tensor) -> None:
        """``tensor`` is about to be written to."""
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == self.storage_address:
            self.on_write(False)

    def assign_data(self, tensor: Tensor, value: Any) -> None:
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
                self.on_write(True)
            if value.data_ptr() != tensor.data_ptr():
                if type(tensor) is ShardParameter:
                    self._detach_aliases()
                tensor.copy_(value)
            self.clear_padding(tensor)

    @staticmethod
    def unwrap(tensor: Tensor) -> None:
        """Gives what :meth:`wrap` has shown its own class back."""
        if isinstance(tensor, _ShardMethods):
            tensor.__class__ = nn.Parameter if type(tensor) is ShardParameter else Tensor  # type: ignore[assignment]
            del tensor.__dict__["_zero_spec"]


def _component(name: str) -> Any:
    """Return the property for the real or the imaginary part. torch's own setter asks no ``__torch_function__``."""
    whole: Any = getattr(Tensor, name)

    def before_write(shard: Tensor, value: Any) -> None:
        part = whole.__get__(shard)
        part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)

    return property(whole.__get__, before_write)


class _ShardMethods:
    _zero_spec: ShardSpec
    real, imag = _component("real"), _component("imag")

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
