"""Define the tensor classes of ``param``, ``param.data`` and ``param.grad`` of sharded parameters.

Elementwise functions run on the shard. Reductions over all elements give the full tensor's result by one collective, in
which every rank must take part. Functions that depend on the full shape raise :class:`UnsupportedError` with the line
to write instead. Results of elementwise functions are shards again: ``(p.grad + 0.1 * p).norm()`` is that of the full
tensor.

Only the Python class of a tensor changes; its ``__torch_function__`` calls the rules in ``sharding/shard_rules.py``.
The engine's own code runs inside :func:`no_shard_dispatch`. Shards are no DTensors, because a shard is a slice of the
flattened parameter (see ``layout.py``), and DTensor adds its dispatch to every operation of the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import DisableTorchFunctionSubclass, Tensor, nn

from lightning_zero.compat.argument_checks import BROADCAST, TENSOR
from lightning_zero.compat.modules import skip_frame
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import ShardLayout, as_real

Rule = Callable[[Any, Any, dict[str, Any]], Any]
P = ParamSpec("P")
R = TypeVar("R")


def no_shard_dispatch() -> AbstractContextManager[None]:
    """Inside, treat shards as plain tensors. Results are plain tensors, too."""
    return DisableTorchFunctionSubclass()


def without_shard_dispatch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run inside :func:`no_shard_dispatch`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_shard_dispatch():
            return function(*args, **kwargs)

    return run


def spec_of(args: Iterable[Any]) -> ShardSpec:
    """Return the spec of the first shard among these values, or in lists among them."""
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
    """Raise :class:`UnsupportedError` for a function that needs more than one rank's elements."""
    raise_unsupported_for(func, spec_of((*args, *kwargs.values())))


def raise_unsupported_for(func: Any, spec: ShardSpec) -> NoReturn:
    """Raise :class:`UnsupportedError` for a function that was called with a shard of this spec."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f".{func.__self__.__name__}"
    own = spec.name.rpartition(".")[2]
    raise UnsupportedError(
        f"{name} was called on this rank's shard of {spec.name!r} (shape {tuple(spec.layout.visible_shape)} of "
        f"{tuple(spec.layout.shape)}), so each rank would get another result. param, param.data and param.grad are "
        f"shards. Read the full parameter from the module that owns it, `module.{own}`, or enter "
        "`with lightning_zero.full_parameters(module): ...`. Do so on every rank. Elementwise functions, and norms, "
        "sums, means and extrema over all elements, work on shards. param.to_local() copies this rank's elements."
    )


def raise_packed(func: Any, spec: ShardSpec) -> NoReturn:
    """Raise :class:`UnsupportedError` for a function that was called with a frozen weight's codes."""
    name = getattr(func, "__name__", str(func))
    own = spec.name.rpartition(".")[2]
    raise UnsupportedError(
        f"{name} was called on {spec.name!r}, a frozen weight whose shard holds {spec.packed} codes and not values. "
        f"Read the values from the module that owns it, `module.{own}`. To change them, enter `with "
        "lightning_zero.full_parameters(module): ...`. Do so on every rank. To compute over trained parameters only, "
        "filter by `p.requires_grad`."
    )


class Mismatch(Exception):
    """Signal that operands do not fit one layout; callers raise the final error."""


def is_shard(value: Any) -> bool:
    """Return True for this rank's part of a parameter, or a result computed from it elementwise."""
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
        f"The engine that sharded {name!r} is closed, so the other ranks' shards are not available for this "
        "reduction. Compute norms and sums before the strategy is closed, or on full values."
    )


def all_gather_shards(own: Tensor, spec: ShardSpec) -> Tensor:
    """All-gather a tensor of one shape and dtype from each rank, to shape [ranks, *own.shape]. Collective."""
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
    """Return the full value of a shard as a plain tensor, in memory order. Collective."""
    spec: ShardSpec = shard.__dict__["_zero_spec"]
    with no_shard_dispatch(), torch.no_grad():
        # As bytes: gloo has no collectives for some dtypes.
        own = shard.detach().reshape(-1).resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        flat = all_gather_shards(own, spec).view(-1).view(shard.dtype)
        return spec.layout.full_view(flat)


def align(values: list[Any], target: Tensor) -> list[Any]:
    """Return the operands in the layout of the shard ``target``; other values stay.

    Two parameters of one shape can have different layouts, which depend on memory order (channels_last) and dtype. A
    plain tensor has the full parameter's shape, or broadcasts to it. Each operand is replaced by the elements of this
    rank's part of the target. Collective if a shard among them has another layout.

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
    """Return True if the tensor has one element for each of the shard's, as an optimizer's state has.

    If the last dimension is as long as a shard, such a tensor could also be one to broadcast. Then each rank has one
    row, and both readings agree, unless memory order differs from the order of dimensions.
    """
    if value.shape != layout.visible_shape and value.shape != (layout.shard_numel,):
        return False
    return layout.order is None or layout.shape[-1] != layout.shard_numel


def _part(full: Tensor, spec: ShardSpec, flat: bool) -> Tensor:
    layout = spec.layout
    try:
        if flat:
            full = full.expand(layout.numel).reshape(layout.shape)
        part = layout.part(full.expand(layout.shape), spec.shard_index)
    except RuntimeError as error:
        raise Mismatch from error
    return part.view(-1) if flat else part


@dataclass(eq=False)
class ShardSpec:
    """Describe the parameter of a shard tensor, as ``DTensorSpec`` does for DTensors.

    It holds no strong reference to the parameter, the engine or the process group: the executor holds parameters, so a
    reference back would be a cycle through C++ that is never collected.

    Attributes:
        shard_index: of this rank.
        group: returns the process group of the shards, or None after the engine is closed.
        on_write: called before the parameter is written to, with True if all values are replaced.
        collective: runs a collective over ``group`` and waits for it, see :meth:`Executor.collective`.
        on_missing_grad: called if users' code reads ``param.grad`` and it is None; None to call nothing.
        packed: kind of the format if the shard holds codes of a frozen weight; None if it holds values.
        on_read: called before user code reads or writes the shard; None to call nothing.
        on_cast: gives the parameter the full value of another dtype while its model is being built; None after that.
        storage_address: address of the storage that the shard is in.
        on_host: the shard is in host memory.
    """

    name: str
    layout: ShardLayout
    shard_index: int
    device: torch.device
    group: Callable[[], dist.ProcessGroup | None]
    on_write: Callable[[bool], None]
    collective: Callable[[Callable[[bool], dist.Work | None]], None]
    packed: str | None = None
    on_read: Callable[[], None] | None = None
    on_cast: Callable[[Tensor], None] | None = None
    storage_address: int = 0
    on_host: bool = False
    on_missing_grad: Callable[[], None] | None = None
    _aliases: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

    def wrap(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` a shard tensor in place, and return it.

        It has one value for each element of the shard.
        """
        if type(tensor) is Tensor or type(tensor) is ShardTensor:
            tensor.__class__ = ShardTensor
        elif type(tensor) is nn.Parameter or type(tensor) is ShardParameter:
            tensor.__class__ = ShardParameter
        else:
            return tensor  # another subclass with its own __torch_function__
        tensor.__dict__["_zero_spec"] = self
        return tensor

    def wrap_alias(self, tensor: Tensor) -> Tensor:
        """Wrap ``tensor``, and remember it for :meth:`assign_data` if it aliases the shard.

        Call it inside :func:`no_shard_dispatch`.
        """
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() == self.storage_address:
            self._aliases = (
                [ref for ref in self._aliases if ref() is not None] if len(self._aliases) > 8 else self._aliases
            )
            self._aliases.append(weakref.ref(tensor))
        return self.wrap(tensor)

    def _detach_aliases(self) -> None:
        """Copy the shard's values to its aliases.

        In a plain module, ``param.data = x`` leaves the old values to tensors that were read before.
        """
        given = [tensor for ref in self._aliases if (tensor := ref()) is not None]
        given = [tensor for tensor in given if tensor.untyped_storage().data_ptr() == self.storage_address]
        self._aliases = []
        copy = given[0].detach().as_subclass(Tensor).reshape(-1).clone() if given else None
        for tensor in given:
            assert copy is not None
            if tensor.numel() == copy.numel() and tensor.dtype == copy.dtype:
                tensor.data = copy.view(tensor.shape)

    def clear_padding(self, tensor: Tensor) -> None:
        """Set the padding to zero, because norms over flat buffers include it."""
        begin, end = self.layout.shard_range(self.shard_index)
        # Reading grad_fn of a view that was created under no_grad() raises.
        plain = not torch.is_grad_enabled() or tensor.grad_fn is None
        if end - begin < self.layout.shard_numel and plain:
            with no_shard_dispatch(), torch.no_grad():
                tensor.detach().view(-1)[end - begin :].zero_()

    def _is_stored(self, tensor: Tensor) -> bool:
        with no_shard_dispatch():
            return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == self.storage_address

    def before_read(self, tensor: Tensor) -> bool:
        """Apply pending writes, if ``tensor`` is in the shard's storage. Return True if it is."""
        if self.on_read is None or not self._is_stored(tensor):
            return False
        self.on_read()
        return True

    def before_write(self, tensor: Tensor) -> None:
        """Prepare a write to ``tensor``, if it is in the shard's storage."""
        if self._is_stored(tensor):
            self.on_write(False)

    def assign_data(self, tensor: Tensor, value: Any) -> None:
        """Do ``tensor.data = value`` by a copy into the shard, which gathers and optimizer steps read.

        Collective if ``value`` casts a parameter of a model that is being built, as ``module.to(dtype)`` does.
        """
        if self.on_cast is not None and type(tensor) is ShardParameter and self._is_cast(tensor, value):
            self.on_cast(gather_value(value))
            return
        with no_shard_dispatch(), torch.no_grad():
            if isinstance(value, Tensor) and value.shape != tensor.shape and value.shape == self.layout.shape:
                value = self.layout.part(value, self.shard_index)
            given = isinstance(value, Tensor) and (value.shape, value.dtype, value.device)
            if given != (tensor.shape, tensor.dtype, tensor.device):
                what = f"shape {tuple(given[0])}, {given[1]}, {given[2]}" if given else type(value).__name__
                own = self.name.rpartition(".")[2]
                raise UnsupportedError(
                    f"The .data of {self.name!r} was given another tensor ({what}), but it is this rank's shard (shape "
                    f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}). Assign full values to the module that "
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

    def _is_cast(self, tensor: Tensor, value: Any) -> bool:
        with no_shard_dispatch():
            return (
                is_shard(value)
                and value.__dict__["_zero_spec"] is self
                and value.dtype != tensor.dtype
                and (value.shape, value.device) == (tensor.shape, tensor.device)
            )

    @staticmethod
    def unwrap(tensor: Tensor) -> None:
        """Undo :meth:`wrap`."""
        if isinstance(tensor, _ShardMethods):
            tensor.__class__ = nn.Parameter if type(tensor) is ShardParameter else Tensor  # type: ignore[assignment]
            del tensor.__dict__["_zero_spec"]


def _component(name: str) -> Any:
    """Return the property for the real or the imaginary part.

    torch's own setter skips ``__torch_function__``.
    """
    component: Any = getattr(Tensor, name)

    def write(shard: Tensor, value: Any) -> None:
        part = component.__get__(shard)
        part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)

    return property(component.__get__, write)


# Queries of a parameter about its dtype and device.
_KIND_QUERIES = (
    Tensor.is_floating_point,
    Tensor.is_complex,
    cast(Any, Tensor.dtype).__get__,
    cast(Any, Tensor.device).__get__,
)


class _ShardMethods:
    _zero_spec: ShardSpec
    _zero_rule_of: ClassVar[Callable[[Any], Rule]]
    real, imag = _component("real"), _component("imag")

    # Applies inside compiled code, too: Dynamo would compile the rules, whose graphs call the rules again, endlessly.
    def to_local(self) -> Tensor:
        """Return a 1-D copy of this rank's elements without padding, in memory order.

        ``param.to_local()`` has ``numel()`` elements over all ranks together.
        """
        begin, end = self._zero_spec.layout.shard_range(self._zero_spec.shard_index)
        with no_shard_dispatch():
            return cast(Tensor, self).detach().as_subclass(Tensor).reshape(-1)[: end - begin].clone()

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # skips __torch_function__
        return raise_unsupported_for(Tensor.set_, self._zero_spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Models look for their dtype among their parameters in forward. That must not break the graph.
        if torch.compiler.is_compiling() and func in _KIND_QUERIES:
            with DisableTorchFunctionSubclass():
                return func(*args)
        return cls._zero_call(func, args, kwargs or {})

    @classmethod
    @torch.compiler.disable
    def _zero_call(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return cls._zero_rule_of(func)(func, args, kwargs)


skip_frame(cast(Any, _ShardMethods.__torch_function__).__func__)  # eager calls from compiled code


class ShardTensor(_ShardMethods, Tensor):
    """Hold one value for each element of a shard, in the shard's shape or 1-D.

    It is a gradient, ``param.data``, or the result of elementwise functions of these.
    """

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
    """Be the registered parameter while its data is a shard."""

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
        return nn.Parameter(gather_value(self), self.requires_grad).__reduce_ex__(protocol)


def set_rules(rule_of: Callable[[Any], Rule]) -> None:
    """Set the function that returns how a function of torch is called with shards among its arguments."""
    _ShardMethods._zero_rule_of = staticmethod(rule_of)


def full_arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a function that uses a tensor's memory directly.

    Collective if a shard is copied. Raises UnsupportedError if the function would make an alias of a shard.
    """
    # torch.tensor() reads elements of a list by item(), which has a rule.
    shards = shards_in(args if name == BROADCAST else [v for v in args if isinstance(v, Tensor)])
    first = next(shards, None)
    if first is None:
        return args
    if name == TENSOR:
        return tuple(gather_value(value) if is_shard(value) else value for value in args)
    return raise_unsupported_for(SimpleNamespace(__name__=name), first.__dict__["_zero_spec"])
