"""What each function of torch does to shards that users hold; see ``sharding/sight.py``.

Functions are told apart by their names. torch itself says of most elementwise ones that they are (a tag of the
operator); what is neither known here nor tagged is refused, since a function that looks at its neighbours, or at the
shape, would compute something else on every rank, without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.compat.ops import OpOverload, OpOverloadPacket
from lightning_zero.compat.tensors import foreach_norm
from lightning_zero.sharding import fills, reductions
from lightning_zero.sharding.refusals import plainly, refuse, sight_of

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout
    from lightning_zero.sharding.sight import Sight

__all__ = ["plainly", "rule_of", "words"]

Rule = Callable[[Any, Any, dict[str, Any]], Any]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ADMINISTRATION = words(
    "element_size stride storage_offset data_ptr is_contiguous is_floating_point is_complex is_signed is_inference "
    "is_conj is_neg is_shared is_pinned is_same_size is_set_to get_device storage untyped_storage _typed_storage "
    "__hash__ __repr__ __format__ __dir__ __setstate__ register_hook register_post_accumulate_grad_hook retain_grad "
    "backward grad share_memory_ record_stream has_names dim_order result_type can_cast promote_types broadcast_shapes "
    "_is_view requires_grad_ increment_version _has_compatible_shallow_copy_type "
    "_amp_foreach_non_finite_check_and_unscale_"
)
_MEASURES = words("size dim ndimension shape ndim")
# Elementwise, or a view of the same elements in the same order, though no tag says so. What comes out must have the
# shard's shape, or be flat.
_SAME = words(
    "clone detach detach_ to type type_as float double half bfloat16 int long short char byte bool cpu cuda xpu "
    "contiguous alias view_as reshape_as expand_as view reshape flatten ravel copy_ fill_ fill zero_ masked_fill_ "
    "pin_memory conj resolve_conj resolve_neg as_subclass multiply multiply_ subtract subtract_ divide "
    "divide_ negative negative_ absolute absolute_ greater greater_equal less less_equal not_equal arctan2 fix "
    "floor_divide isclose isreal zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full "
    "new_tensor"
)
_OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in words("add sub mul truediv div floordiv mod pow and or xor lshift rshift")
) | frozenset(f"__{name}__" for name in words("neg pos abs invert eq ne lt le gt ge"))
# They ask each shard for its sizes some ten times, from hundreds of frames deep.
_COMPILERS = ("torch._dynamo.", "torch._subclasses.")
_DISABLING = "torch._dynamo.eval_frame"  # where calls of what torch.compiler.disable has decorated pass
_TRANSPOSED = frozenset(["T", "mT", "H", "mH"])


@lru_cache(maxsize=4096)
def rule_of(func: Any) -> Rule:
    """How ``func`` is called when one of its arguments is a shard in sight."""
    name = getattr(func, "__name__", "")
    if isinstance(func, OpOverload | OpOverloadPacket):
        return _plain
    if name in ("__get__", "__set__", "__delete__"):
        return _property(getattr(func.__self__, "__name__", ""), name)
    if getattr(func, "__module__", "") == "torch.nn.init":
        return fills.initialise
    if name in fills.IN_PLACE:
        return fills.fill
    if name in fills.LIKE:
        return fills.draw_like
    if name in ("numel", "nelement"):
        return _count
    if name in _MEASURES:
        return _measure
    if name in _ADMINISTRATION:
        return _plain
    if name in reductions.BY_NAME:
        return partial(reductions.reduce, reductions.BY_NAME[name], _elementwise)
    if name in ("__getitem__", "__setitem__"):
        return _index
    if name.startswith(("_foreach_", "_fused_")):
        return reductions.norms if name == foreach_norm.__name__ else _lists
    return _elementwise if name in _SAME or name in _OPERATORS or _is_pointwise(name) else refuse


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags} if packet else set()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _property(attribute: str, access: str) -> Rule:
    if attribute == "data":
        return _data if access == "__get__" else _assign_data
    if attribute == "grad" and access == "__set__":
        return _assign_grad
    if attribute in _MEASURES:
        return _measure
    return refuse if attribute in _TRANSPOSED else _plain


def _plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _count(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    return sight_of(args).layout.numel  # as the parameter itself counts


def _measure(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # torch.nn.init takes fans from shapes: it must see the whole one. Modes (a torch.device context) may be in between.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") == _DISABLING:  # __torch_function__
        frame = frame.f_back
    while frame is not None and (name := frame.f_globals.get("__name__", "")) != "torch.nn.init":
        inner = name.startswith(("torch.", "lightning_zero.")) or frame.f_code.co_name == "__torch_function__"
        inner = inner and not name.startswith(_COMPILERS)
        frame = frame.f_back if inner else None
    if frame is not None:
        return func(torch.empty(sight_of(args).layout.shape, device="meta"), *args[1:], **kwargs)
    return _plain(func, args, kwargs)


# -- one by one


def _elementwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    sight = _only_sight(func, args, kwargs)
    layout = sight.layout
    name = getattr(func, "__name__", "")
    written = [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else []
    if args and (name.endswith("_") and not name.endswith("__") or name.startswith("__i") and name != "__invert__"):
        written.append(args[0])
    with plainly():
        for tensor in written:
            if tensor.shape != layout.visible_shape and tensor.shape != (layout.shard_numel,):
                refuse(func, args, kwargs)
            sight.write(tensor)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if _of_another_shape(args, kwargs, layout):
                refuse(func, args, kwargs)
            raise
        for tensor in written:
            sight.clear_padding(tensor)
    return _shown(result, sight, func, args, kwargs, written)


def _of_another_shape(args: Any, kwargs: dict[str, Any], layout: ShardLayout) -> bool:
    """Whether there is an argument that could fit a whole parameter, but no shard: a shape, or a tensor."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shapes = any(isinstance(value, int | torch.Size | tuple | list) for value in args[1:])
    return shapes or any(t.numel() > 1 and t.shape[-1:] != (layout.shard_numel,) for t in tensors)


def _shown(result: Any, sight: Sight, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_shown(value, sight, func, args, kwargs, written) for value in result)
    if not isinstance(result, Tensor) or any(result is tensor for tensor in written):
        return result
    with plainly():
        shape = result.shape
    if shape == sight.layout.visible_shape or shape == (sight.layout.shard_numel,):
        return sight.show(result)
    if getattr(func, "__name__", "").startswith("new_"):
        return result  # of another shape: only the dtype and the device are the shard's
    return refuse(func, args, kwargs)


def _sights(values: Any) -> Iterator[Sight]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _sights(value)
        elif isinstance(value, Tensor) and "_zero_sight" in value.__dict__:
            yield value.__dict__["_zero_sight"]


def _only_sight(func: Any, args: Any, kwargs: dict[str, Any]) -> Sight:
    sights = [*_sights(args), *_sights(kwargs.values())]
    if any(sight.layout.shape != sights[0].layout.shape for sight in sights):
        return refuse(func, args, kwargs)
    return sights[0]


def _lists(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch._foreach_*`` and ``torch._fused_*``: lists of tensors, one by one."""
    in_place = func.__name__.endswith("_")
    with plainly():
        for value in args[0] if in_place else ():
            if (sight := next(_sights([value]), None)) is not None:
                sight.write(value)
        results = func(*args, **kwargs)
    of = [next(_sights([value]), None) for value in args[0]]
    given = {id(value) for value in args[0]}
    with plainly():
        for value, sight in zip(args[0], of, strict=True):
            if sight is not None:
                sight.clear_padding(value)
    if not isinstance(results, tuple | list):
        return results
    lists = [next(_sights([*values]), None) for values in zip(*(a for a in args if _is_list(a)), strict=False)]
    return type(results)(
        value if sight is None or id(value) in given else _shown(value, sight, func, args, kwargs, [])
        for value, sight in zip(results, lists, strict=True)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(entry, Tensor) for entry in value)


def _index(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """All of it, or for writing what a mask picks; anything else means other elements on each rank."""
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    everything = all(part is Ellipsis or part == slice(None) for part in parts if not isinstance(part, Tensor))
    masked = isinstance(index, Tensor) and "_zero_sight" in index.__dict__ and index.dtype == torch.bool
    if func.__name__ == "__getitem__":
        if not everything or any(isinstance(part, Tensor) for part in parts):
            refuse(func, args, kwargs)
        return _elementwise(func, args, kwargs)
    value = args[2]
    single = not isinstance(value, Tensor) or value.dim() == 0
    if masked and single or everything and not isinstance(index, Tensor):
        sight = _only_sight(func, args, kwargs)
        if not single and value.shape != sight.layout.visible_shape:
            refuse(func, args, kwargs)
        with plainly():
            sight.write(args[0])
            func(*args, **kwargs)
            sight.clear_padding(args[0])
        return None
    return refuse(func, args, kwargs)


# -- the parameter's parts


def _data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with plainly():
        value = func(*args, **kwargs)
    return sight_of(args).show(value)


def _assign_data(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    tensor, value = args
    sight_of(args).assign(tensor, value)


def _assign_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    param, grad = args
    sight = sight_of(args)
    with plainly():
        func(param, grad)
        if isinstance(grad, Tensor):
            sight.clear_padding(grad)
            sight.show(grad)
