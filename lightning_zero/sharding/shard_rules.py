"""Decide how each function of torch treats shard tensors; see ``sharding/shard_tensor.py``.

Functions are identified by name. torch tags most elementwise operators as such. Functions that are neither listed here
nor tagged raise, because one that depends on neighbouring elements or on the shape would silently compute something
else on every rank.

In-place random functions draw the full parameter's numbers on every rank and keep the rank's part: this is the result
of a plain module with the same generator. Filling only the shard would give every rank the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.compat.tensors import OpOverload, OpOverloadPacket, foreach_norm
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.shard_reductions import REDUCTIONS, foreach_norms, reduce
from lightning_zero.sharding.shard_tensor import (
    Mismatch,
    Rule,
    ShardSpec,
    align,
    gather_value,
    is_shard,
    no_shard_dispatch,
    raise_packed,
    raise_unsupported,
    shards_in,
    spec_of,
)
from lightning_zero.sharding.weight_reader import GatheredWeight


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PASSED_THROUGH = words(
    "element_size storage_offset data_ptr is_floating_point is_complex is_signed is_inference is_conj is_neg "
    "is_shared is_pinned get_device __hash__ __dir__ __setstate__ register_hook register_post_accumulate_grad_hook "
    "retain_grad backward grad share_memory_ record_stream has_names result_type can_cast promote_types _is_view "
    "requires_grad_ increment_version _has_compatible_shallow_copy_type _amp_foreach_non_finite_check_and_unscale_"
)
# These describe the full parameter, as for a DTensor.
FULL_SHAPE_QUERIES: dict[str, Callable[..., Any]] = {
    "shape": lambda layout, itemsize: layout.shape,
    "size": lambda layout, itemsize, dim=None: layout.shape if dim is None else layout.shape[dim],
    "dim": lambda layout, itemsize: len(layout.shape),
    "ndimension": lambda layout, itemsize: len(layout.shape),
    "ndim": lambda layout, itemsize: len(layout.shape),
    "numel": lambda layout, itemsize: layout.numel,
    "nelement": lambda layout, itemsize: layout.numel,
    "nbytes": lambda layout, itemsize: layout.numel * itemsize,
    "stride": lambda layout, itemsize, dim=None: layout.strides if dim is None else layout.strides[dim],
    "__len__": lambda layout, itemsize: layout.shape[0],
    "is_contiguous": lambda layout, itemsize, *format, **named: _empty_like(layout).is_contiguous(*format, **named),
}
_QUERIES_WITH_ARGUMENTS = words("size stride is_contiguous")
_STORAGE_ACCESS = words("dim_order is_set_to untyped_storage storage _typed_storage")
_RESHAPES = words("view reshape flatten ravel view_as reshape_as expand expand_as")
# Elementwise functions that torch does not tag.
_UNTAGGED_POINTWISE = words(
    "clone detach detach_ to type type_as float double half bfloat16 int long short char byte bool cpu cuda xpu "
    "contiguous alias copy_ fill_ fill zero_ masked_fill_ "
    "pin_memory real imag conj resolve_conj resolve_neg as_subclass multiply multiply_ subtract subtract_ divide "
    "divide_ negative negative_ absolute absolute_ greater greater_equal less less_equal not_equal arctan2 fix "
    "floor_divide isclose isreal zeros_like ones_like empty_like full_like"
)
_NEW_TENSORS = words("new_empty new_zeros new_ones new_full new_tensor new_empty_strided")
_OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in words("add sub mul truediv div floordiv mod pow and or xor lshift rshift")
) | frozenset(f"__{name}__" for name in words("neg pos abs invert eq ne lt le gt ge"))
# Code that reads `param.grad` for its own purposes, not for a user.
_TRAINING_CODE = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.", "lightning_zero.")
# Compilers see the shard's own shape and storage.
_COMPILERS = ("torch._dynamo.", "torch._subclasses.", "torch._functorch._aot_autograd.", "torch._inductor.")
# Frames between the caller and a rule: torch.compiler.disable and the lookup of __torch_function__.
_DISPATCH_MODULES = ("torch._dynamo.eval_frame", "torch.overrides", "torch._tensor", "torch._ops")
_TRANSPOSED = frozenset(["T", "mT", "H", "mH"])


@lru_cache(maxsize=4096)
def rule_of(func: Any) -> Rule:
    """Return the rule by which ``func`` is called if one of its arguments is a shard tensor."""
    rule = _rule_of(func)
    if getattr(rule, "func", rule) in _READ_NO_VALUES:
        return rule
    keeps_bytes = getattr(func, "__name__", "") in _KEEP_BYTES
    return partial(_call_with_bytes if keeps_bytes else _call_with_values, rule)


def _call_with_bytes(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a rule that reads or writes shards, after pending writes to gathered weights."""
    _apply_pending_writes(shards_in((*args, *kwargs.values())))
    return rule(func, args, kwargs)


def _call_with_values(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a rule that reads or writes values; raise if a shard holds codes instead."""
    found = list(shards_in((*args, *kwargs.values())))
    packed = [shard for shard in found if shard.__dict__["_zero_spec"].packed is not None]
    if packed and not (getattr(func, "__name__", "") == "copy_" and len(packed) == len(args)):
        raise_packed(func, packed[0].__dict__["_zero_spec"])
    _apply_pending_writes(found)
    return rule(func, args, kwargs)


def _apply_pending_writes(shards: Iterable[Tensor]) -> None:
    for shard in shards:
        if shard.__dict__["_zero_spec"].before_read(shard):
            return  # for all shards of the model


def _set_requires_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    spec = spec_of(args[:1])
    if spec.packed is not None and (True in args[1:] or kwargs.get("requires_grad") or not (args[1:] or kwargs)):
        raise UnsupportedError(
            f"requires_grad was set on {spec.name!r}, whose {spec.packed} codes cannot be trained. Set it before the "
            f"model is sharded, or exclude the weight: tuning=Tuning(frozen_exclude=('*{spec.name}',))."
        )
    return _call_plain(func, args, kwargs)


def _rule_of(func: Any) -> Rule:
    name = getattr(func, "__name__", "")
    if isinstance(func, OpOverload | OpOverloadPacket):
        return _operator
    if name in ("__get__", "__set__", "__delete__"):
        return _property(getattr(func.__self__, "__name__", ""), name)
    if getattr(func, "__module__", "") == "torch.nn.init":
        return run_init
    if name in RANDOM_IN_PLACE:
        return fill_random
    if name in RANDOM_LIKE:
        return draw_like
    if name in FULL_SHAPE_QUERIES:
        return partial(_query_full_shape, name)
    if name == "requires_grad_":
        return _set_requires_grad
    if name in _PASSED_THROUGH or name in _NEW_TENSORS:
        return _call_plain
    if name in _STORAGE_ACCESS:
        return _access_storage
    if name in _RESHAPES:
        return _reshape
    if name in ("__repr__", "__format__"):
        return _describe
    if name in REDUCTIONS:
        return partial(reduce, REDUCTIONS[name], _elementwise)
    if name in ("__getitem__", "__setitem__"):
        return _index
    if name in ("__eq__", "eq"):
        return _equal
    if name.startswith(("_foreach_", "_fused_")):
        return foreach_norms if name == foreach_norm.__name__ else _foreach
    return (
        _elementwise if name in _UNTAGGED_POINTWISE or name in _OPERATORS or _is_pointwise(name) else raise_unsupported
    )


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags} if packet else set()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _property(attribute: str, access: str) -> Rule:
    if attribute == "data":
        return _get_data if access == "__get__" else _assign_data
    if attribute == "grad" and access != "__delete__":
        return _read_grad if access == "__get__" else _assign_grad
    if attribute == "requires_grad" and access == "__set__":
        return _set_requires_grad
    if attribute in FULL_SHAPE_QUERIES:
        return partial(_query_full_shape, attribute)
    if attribute in ("real", "imag"):
        return _elementwise
    return raise_unsupported if attribute in _TRANSPOSED else _call_plain


def _call_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with no_shard_dispatch():
        return func(*args, **kwargs)


def _operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator of the dispatcher as torch's function of the same name, if users' code calls it."""
    namespace, name, *_ = str(func).split(".")
    caller = _caller()
    if namespace == "lightning_zero" or not caller or caller.startswith(_COMPILERS):
        return _call_plain(func, args, kwargs)
    function = getattr(Tensor, name, getattr(torch, name, None)) if namespace == "aten" else None
    if function is None:
        return raise_unsupported(SimpleNamespace(__name__=f"torch.ops.{namespace}.{name}"), args, kwargs)
    return rule_of(function)(function, args, kwargs)


def _query_full_shape(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    caller = _caller()
    if caller.startswith(_COMPILERS):
        return _call_plain(func, args, kwargs)
    if caller == "torch._functorch.vmap":  # it uses the shard's storage without further dispatch
        raise_unsupported(torch.vmap, args, kwargs)
    return query_full_shape(name, spec_of(args).layout, args, kwargs)


def query_full_shape(name: str, layout: ShardLayout, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a function or property of :data:`FULL_SHAPE_QUERIES` returns for the full parameter."""
    rest = args[1:] if name in _QUERIES_WITH_ARGUMENTS else ()  # a property's getter also receives the class
    with no_shard_dispatch():
        return FULL_SHAPE_QUERIES[name](layout, args[0].element_size(), *rest, **kwargs)


def _caller() -> str:
    """Return the name of the module whose code called torch."""
    frame: FrameType | None = sys._getframe(3)
    # Modes (a torch.device context) and methods that torch implements in Python may be in between.
    while frame is not None and (
        frame.f_code.co_name in ("__torch_function__", "_zero_call")
        or frame.f_globals.get("__name__", "") in _DISPATCH_MODULES
    ):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _access_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let torch itself access a shard's storage; other code would take it for the full parameter's."""
    if _caller().startswith(("torch.", "lightning_zero.")):
        return _call_plain(func, args, kwargs)
    return raise_unsupported(func, args, kwargs)


def _describe(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    shard, spec = args[0], spec_of(args)
    format_spec = args[1] if len(args) > 1 else ""
    if format_spec and spec.layout.numel == 1:
        return format(shard.item(), format_spec)
    begin, end = spec.layout.shard_range(spec.shard_index)
    with no_shard_dispatch():
        values = repr(shard.detach().as_subclass(Tensor).reshape(-1)[: end - begin])
    return (
        f"{type(shard).__name__}({spec.name!r}, shape={tuple(spec.layout.shape)}, elements {begin} to {end} of "
        f"{spec.layout.numel} on this rank: {values})"
    )


# -- elementwise functions


def _elementwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    written = [out] if isinstance(out, Tensor) else []
    if args and (name.endswith("_") and not name.endswith("__") or name.startswith("__i") and name != "__invert__"):
        written.append(args[0])
    if name not in _CREATES_LIKE:
        try:
            args, kwargs, target = _aligned(func, args, kwargs, written)
        except Mismatch:
            raise_unsupported(func, args, kwargs)
        if target is None:  # a full tensor is written to, with full values
            return _call_plain(func, args, kwargs)
    spec = spec_of((*written, *args, *kwargs.values()))
    layout = spec.layout
    with no_shard_dispatch():
        for tensor in written:
            if tensor.shape != layout.visible_shape and tensor.shape != (layout.shard_numel,):
                raise_unsupported(func, args, kwargs)
            spec.before_write(tensor)
        result = func(*args, **kwargs)
        for tensor in written:
            spec.clear_padding(tensor)
    return _wrap_results(result, spec, func, args, kwargs, written)


def _equal(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compare elements. The result is true for a parameter and a weight gathered from it.

    So sets and dicts find a parameter by either.
    """
    result = _elementwise(func, args, kwargs)
    first, second = (args[0], args[1]) if isinstance(args[0], nn.Parameter) else (args[1], args[0])
    if isinstance(second, GatheredWeight) and second._zero_param is first:
        result.__dict__["_zero_same"] = True
    return result


_CREATES_LIKE = words("zeros_like ones_like empty_like full_like")


def _aligned(
    func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]
) -> tuple[Any, dict[str, Any], Tensor | None]:
    """Return the arguments in one layout, and a shard of that layout.

    The shard is None if a full plain tensor is written to.
    """
    values = [*args, *kwargs.values()]
    first: Any = written[0] if written else None
    if first is not None and not is_shard(first):
        other = spec_of(values).layout
        with no_shard_dispatch():
            full = first.shape == other.shape and (first.shape != other.visible_shape or other.world_size > 1)
        if full:
            values = [gather_value(value) if is_shard(value) else value for value in values]
            return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True)), None
    target = first if is_shard(first) else _largest(values)
    values = align(values, target)
    return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True)), target


def _largest(values: list[Any]) -> Tensor:
    """Return the shard to whose parameter's shape the other shapes broadcast."""
    return max(shards_in(values), key=lambda shard: (len(_shape(shard)), _shape(shard).numel()))


def _shape(shard: Tensor) -> torch.Size:
    return shard.__dict__["_zero_spec"].layout.shape


def _reshape(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return a view of all elements in order: in the parameter's own shape, or flat."""
    first, *rest = args
    if isinstance(rest[0] if rest else kwargs.get("dtype"), torch.dtype):
        return _elementwise(func, args, kwargs)
    shapes = [_empty(_shape(value)) if is_shard(value) else value for value in rest]
    named = {key: _empty(_shape(value)) if is_shard(value) else value for key, value in kwargs.items()}
    with no_shard_dispatch():
        if not is_shard(first):
            return func(first, *shapes, **named)
        spec: ShardSpec = first.__dict__["_zero_spec"]
        layout = spec.layout
        flat = first.dim() == 1 and len(layout.shape) > 1
        made = func(_empty((layout.numel,) if flat else layout.shape), *shapes, **named).shape
        if made == layout.shape:
            return spec.wrap_alias(first.view(layout.visible_shape))
        if made == (layout.numel,):
            return spec.wrap_alias(first.view(-1))
    return raise_unsupported(func, args, kwargs)


def _empty(shape: Any) -> Tensor:
    return torch.empty(shape, device="meta")


def _empty_like(layout: ShardLayout) -> Tensor:
    return torch.empty_strided(layout.shape, layout.strides, device="meta")


def _wrap_results(
    result: Any, spec: ShardSpec, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]
) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_wrap_results(value, spec, func, args, kwargs, written) for value in result)
    if not isinstance(result, Tensor) or any(result is tensor for tensor in written):
        return result
    with no_shard_dispatch():
        shape = result.shape
        if shape == spec.layout.visible_shape or shape == (spec.layout.shard_numel,):
            return spec.wrap_alias(result)
    return raise_unsupported(func, args, kwargs)


def _foreach(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``torch._foreach_*`` and ``torch._fused_*`` on lists of tensors."""
    in_place = func.__name__.endswith("_")
    lists = [[*value] if _is_list(value) else None for value in args]
    count = len(args[0])
    plain = []  # positions at which a full plain tensor is written to
    for position in range(count):
        entries = [found[position] for found in lists if found is not None and len(found) == count]
        if next(shards_in(entries), None) is None:
            continue
        try:
            entries, _, target = _aligned(func, entries, {}, entries[:1] if in_place else [])
        except Mismatch:
            raise_unsupported(func, entries, {})
        if target is None:
            plain.append(position)
        remaining = iter(entries)
        for found in lists:
            if found is not None and len(found) == count:
                found[position] = next(remaining)
    args = [value if found is None else found for value, found in zip(args, lists, strict=True)]
    specs = [
        next((t.__dict__["_zero_spec"] for t in shards_in([f[i] for f in lists if f and i < len(f)])), None)
        for i in range(count)
    ]
    with no_shard_dispatch():
        for value, spec in zip(args[0], specs, strict=True):
            if in_place and spec is not None:
                spec.before_write(value)
        results = func(*args, **kwargs)
        for value, spec in zip(args[0], specs, strict=True):
            if spec is not None:
                spec.clear_padding(value)
    if not isinstance(results, tuple | list):
        return results
    given = {id(value) for value in args[0]}
    return type(results)(
        value if spec is None or id(value) in given else _wrap_results(value, spec, func, args, kwargs, [])
        for value, spec in zip(results, specs, strict=True)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(entry, Tensor) for entry in value)


def _index(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Index all elements, or write a value where a mask is True.

    Any other index means other elements on each rank, and raises.
    """
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    everything = all(part is Ellipsis or part == slice(None) for part in parts if not isinstance(part, Tensor))
    masked = isinstance(index, Tensor) and is_shard(args[0]) and index.dtype == torch.bool
    if func.__name__ == "__getitem__":
        if not everything or any(isinstance(part, Tensor) for part in parts):
            raise_unsupported(func, args, kwargs)
        return _elementwise(func, args, kwargs)
    value = args[2]
    single = not isinstance(value, Tensor) or value.dim() == 0
    if is_shard(args[0]) and (masked and single or everything and not isinstance(index, Tensor)):
        spec = spec_of(args[:1])
        try:
            index, value = align([index, value], args[0])
        except Mismatch:
            raise_unsupported(func, args, kwargs)
        with no_shard_dispatch():
            spec.before_write(args[0])
            func(args[0], index, value)
            spec.clear_padding(args[0])
        return None
    return raise_unsupported(func, args, kwargs)


# -- attributes of the parameter


def _get_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with no_shard_dispatch():
        return spec_of(args).wrap_alias(func(*args, **kwargs))


def _assign_data(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    tensor, value = args
    spec_of(args).assign_data(tensor, value)


def _read_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    grad = _call_plain(func, args, kwargs)
    missing = spec_of(args).on_missing_grad
    if grad is None and missing is not None and not _caller().startswith(_TRAINING_CODE):
        missing()
    return grad


def _assign_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    param, grad = args
    spec = spec_of(args)
    if isinstance(grad, Tensor):
        try:
            [grad] = align([grad], param)
        except Mismatch:
            raise_unsupported(func, args, kwargs)
    with no_shard_dispatch():
        if isinstance(grad, Tensor) and grad.shape == spec.layout.shape != param.shape:  # of a single element
            grad = spec.layout.part(grad, spec.shard_index)
        func(param, grad)
        if isinstance(grad, Tensor):
            spec.clear_padding(grad)
            spec.wrap(grad)


RANDOM_IN_PLACE = frozenset(
    ["normal_", "uniform_", "exponential_", "bernoulli_", "cauchy_", "log_normal_", "geometric_", "random_"]
)
RANDOM_LIKE = frozenset(["randn_like", "rand_like", "randint_like"])


def fill_random(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Run ``tensor.normal_()`` and similar functions."""
    shard = args[0]
    spec = spec_of(args)
    with no_shard_dispatch():
        full = torch.empty(spec.layout.shape, dtype=shard.dtype, device=shard.device)
        func(full, *args[1:], **kwargs)
        _write_local_part(shard, full, spec)
    return shard


def draw_like(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Run ``torch.randn_like(tensor)`` and similar functions."""
    spec = spec_of((*args, *kwargs.values()))
    like = args[0] if args else kwargs["input"]
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    with no_shard_dispatch():
        full = func(torch.empty(spec.layout.shape, dtype=like.dtype, device=like.device), *args[1:], **rest)
        shard = torch.zeros(like.shape, dtype=full.dtype, device=full.device)
        _write_local_part(shard, full, spec)
        return spec.wrap(shard)


def run_init(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Run a function of ``torch.nn.init`` on the full value."""
    shard = args[0] if args else kwargs["tensor"]
    rest = {key: value for key, value in kwargs.items() if key != "tensor"}
    with torch.no_grad():
        return fill_random(func, (shard, *args[1:]), rest)


def _write_local_part(shard: Tensor, full: Tensor, spec: ShardSpec) -> None:
    # Fill under the caller's grad mode, so that autograd raises where it would for a plain parameter.
    part = spec.layout.part(full, spec.shard_index)
    spec.before_write(shard)
    shard.copy_(part.view(shard.shape))


# Rules that do not depend on values, and functions that keep each element. Codes of frozen weights allow only these.
_READ_NO_VALUES = (
    _operator,
    _call_plain,
    _access_storage,
    _assign_grad,
    _describe,
    _equal,
    _get_data,
    _query_full_shape,
    _read_grad,
    _set_requires_grad,
    raise_unsupported,
)
_KEEP_BYTES = words("clone detach detach_ to cpu cuda xpu contiguous alias pin_memory as_subclass")
