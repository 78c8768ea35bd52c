"""Reduce all elements of a shard tensor, as a plain full tensor would, by one collective.

Each rank reduces its own elements (never the padding) to a few numbers. All ranks exchange these numbers and finish
with the same computation. Results are plain scalars, identical on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.sharding.shard_tensor import (
    Mismatch,
    ShardSpec,
    align,
    all_gather_shards,
    is_shard,
    no_shard_dispatch,
    raise_unsupported_for,
    shards_in,
    spec_of,
)

INF = math.inf


class _LocalPart:
    """Hold this rank's elements of one shard, flat and without padding."""

    def __init__(self, shard: Tensor) -> None:
        self.spec: ShardSpec = spec_of([shard])
        begin, end = self.spec.layout.shard_range(self.spec.shard_index)
        self.values = shard.detach().reshape(-1)[: end - begin]
        self.count = self.spec.layout.numel
        self.dtype = shard.dtype
        # torch's own kernels accumulate in this dtype
        self.wide = torch.float32 if shard.dtype in (torch.float16, torch.bfloat16) else None

    def exchange(self, *numbers: Tensor) -> Tensor:
        """Return all ranks' numbers: [ranks, numbers], in float64, or complex128 if one of them is complex."""
        wide = torch.complex128 if any(number.is_complex() for number in numbers) else torch.float64
        return all_gather_shards(torch.stack([number.to(wide) for number in numbers]), self.spec)

    def extreme(self, reduce: Callable[[Tensor], Tensor], empty: float) -> Tensor:
        return reduce(self.values) if self.values.numel() else torch.tensor(empty, device=self.values.device)


class _ReductionForAutograd(torch.autograd.Function):
    """Make the result depend on the shard, so that backward reaches the guard against such a loss."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, value: Tensor) -> Tensor:
        ctx.shape = shard.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.expand(ctx.shape), None


def is_elementwise_pair(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True for ``max`` and ``min`` of two tensors, which are elementwise."""
    return name in ("max", "min") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)


def reduce(
    rule: Callable[..., Any], elementwise: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call ``func``, whose reduction is ``rule``, on shard tensors."""
    name = func.__name__
    if is_elementwise_pair(name, args, kwargs):
        return elementwise(func, args, kwargs)
    if name in _REAL_ONLY:
        for shard in shards_in((*args, *kwargs.values())):
            if shard.is_complex():
                with no_shard_dispatch():
                    func(torch.zeros(1, dtype=shard.dtype))  # raise torch's own error, also on ranks without elements
    kwargs = dict(kwargs)
    spec = spec_of((*args, *kwargs.values()))
    names = [name for name in ("input", "self", "A", "x") if name in kwargs]
    first, rest = (args[0], list(args[1:])) if args else (kwargs.pop(names[0]) if names else None, [])
    if kwargs.pop("out", None) is not None or not isinstance(first, Tensor):
        raise_unsupported_for(func, spec)
    if name == "equal":
        first, *rest = _of_one_layout(
            func, [first, *rest, *(kwargs.pop(k) for k in ("other", "tensor") if k in kwargs)]
        )
    elif not is_shard(first):
        raise_unsupported_for(func, spec)
    if kwargs.get("keepdim") or not _all_dimensions(name, rest, kwargs, len(spec.layout.shape)):
        raise_unsupported_for(func, spec)
    with no_shard_dispatch():
        try:
            result = rule(first, *rest, **kwargs)
        except NotImplementedError:
            raise_unsupported_for(func, spec)
        tensors = isinstance(result, Tensor)
        if tensors and result.is_floating_point() and torch.is_grad_enabled() and first.requires_grad:
            result = _ReductionForAutograd.apply(first, result)
    return result


def _of_one_layout(func: Any, values: list[Any]) -> list[Any]:
    target = next(shards_in(values))
    spec: ShardSpec = target.__dict__["_zero_spec"]
    try:
        first, *rest = align(values, target)
    except Mismatch:
        raise_unsupported_for(func, spec)
    return [spec.wrap(first), *rest]


_DIM_IS_SECOND = {"norm", "linalg_norm", "linalg_vector_norm"}
_REAL_ONLY = {"max", "min", "amax", "amin", "aminmax"}


def _all_dimensions(name: str, rest: list[Any], kwargs: dict[str, Any], dimensions: int) -> bool:
    """Return True if a reduction covers all dimensions; removes the arguments that name them."""
    if name == "equal":
        return True
    place = 1 if name in _DIM_IS_SECOND else 0
    dim = kwargs.pop("dim", kwargs.pop("axis", None))
    kwargs.pop("keepdim", None)
    if len(rest) > place and not isinstance(rest[place], bool):
        dim = rest.pop(place)
        if len(rest) > place and isinstance(rest[place], bool) and rest.pop(place):
            return False  # keepdim
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return True
    named = {d % max(dimensions, 1) for d in ((dim,) if isinstance(dim, int) else dim)}
    # with dim=, torch.max and torch.min also return positions
    return len(named) == max(dimensions, 1) and name not in ("max", "min", "aminmax")


# -- reductions of plain tensors


def _sum_over_ranks(part: _LocalPart, dtype: torch.dtype | None, values: Tensor) -> Tensor:
    found = part.exchange(values.sum(dtype=part.wide)).sum(0)[0]
    return found.to(dtype or _sum_dtype(part.dtype))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and products over elements of this dtype."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _sum(shard: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    part = _LocalPart(shard)
    return _sum_over_ranks(part, dtype, part.values)


def _mean(shard: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    part = _LocalPart(shard)
    if dtype is None and _sum_dtype(part.dtype) is not part.dtype:
        shard.mean()  # torch's own error
    return (part.exchange(part.values.sum(dtype=part.wide)).sum(0)[0] / part.count).to(dtype or part.dtype)


def _max(shard: Tensor) -> Tensor:
    part = _LocalPart(shard)
    return part.exchange(part.extreme(torch.amax, -INF)).amax().to(part.dtype)


def _min(shard: Tensor) -> Tensor:
    part = _LocalPart(shard)
    return part.exchange(part.extreme(torch.amin, INF)).amin().to(part.dtype)


def _aminmax(shard: Tensor) -> Any:
    part = _LocalPart(shard)
    found = part.exchange(part.extreme(torch.amin, INF), part.extreme(torch.amax, -INF))
    return torch.return_types.aminmax((found[:, 0].amin().to(part.dtype), found[:, 1].amax().to(part.dtype)))


def _all(shard: Tensor) -> Tensor:
    part = _LocalPart(shard)
    return part.exchange(part.values.all()).amin() > 0


def _any(shard: Tensor) -> Tensor:
    part = _LocalPart(shard)
    return part.exchange(part.values.any()).amax() > 0


def _count_nonzero(shard: Tensor) -> Tensor:
    part = _LocalPart(shard)
    return part.exchange(part.values.count_nonzero()).sum().to(torch.int64)


def _variance_and_mean(part: _LocalPart, unbiased: bool, correction: float | None) -> tuple[Tensor, Tensor]:
    """Return variance and mean in float64.

    Each rank subtracts its own mean first, so that no digits are lost.
    """
    values = part.values.to(part.wide or part.dtype)
    count = torch.tensor(values.numel(), device=values.device)
    mean = values.mean() if values.numel() else values.new_zeros(())  # all ranks must exchange one dtype
    found = part.exchange(count, mean, (values - mean).abs().square().sum())
    counts, means, squares = found[:, 0].real, found[:, 1], found[:, 2].real
    full_mean = (counts * means).sum() / part.count
    total = squares.sum() + (counts * (means - full_mean).abs().square()).sum()
    return total / max(0.0, part.count - (float(unbiased) if correction is None else correction)), full_mean


def _var(shard: Tensor, unbiased: bool = True, *, correction: float | None = None) -> Tensor:
    part = _LocalPart(shard)
    return _variance_and_mean(part, unbiased, correction)[0].to(part.dtype.to_real())


def _std(shard: Tensor, unbiased: bool = True, *, correction: float | None = None) -> Tensor:
    part = _LocalPart(shard)
    return _variance_and_mean(part, unbiased, correction)[0].sqrt().to(part.dtype.to_real())


def _order(p: Any) -> float:
    if p in ("fro", None):
        return 2.0
    if isinstance(p, str):
        raise NotImplementedError(p)
    return float(p)


def _norm(shard: Tensor, p: Any = "fro", *, dtype: torch.dtype | None = None) -> Tensor:
    order = _order(p)
    part = _LocalPart(shard)
    [norm] = _norm_of_norms(part.exchange(_local_norm(part, order, dtype)), order).unbind()
    return norm.to((dtype or part.dtype).to_real())


def _linalg_norm(shard: Tensor, ord: Any = None, *, dtype: torch.dtype | None = None) -> Tensor:
    if ord is not None and (isinstance(ord, str) or len(spec_of([shard]).layout.shape) > 1) and ord != "fro":
        raise NotImplementedError("a norm of a matrix")
    return _norm(shard, ord, dtype=dtype)


def _vector_norm(shard: Tensor, ord: Any = 2, *, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(shard, ord, dtype=dtype)


def _local_norm(part: _LocalPart, order: float, dtype: torch.dtype | None) -> Tensor:
    values = part.values.abs() if part.dtype.is_complex else part.values
    if order in (-INF, 0) or order < 0 or not values.numel():
        empty = INF if order < 0 else 0.0
        wide = values.to(torch.float64)
        return torch.linalg.vector_norm(wide, order) if wide.numel() else wide.new_tensor(empty)
    return torch.linalg.vector_norm(values, order, dtype=dtype.to_real() if dtype else part.wide)


def _norm_of_norms(found: Tensor, order: float) -> Tensor:
    """Combine the ranks' norms into the norm of all elements."""
    return found.sum(0) if order == 0 else torch.linalg.vector_norm(found, order, dim=0)


def _equal(shard: Tensor, other: Tensor) -> bool:
    part = _LocalPart(shard)
    same = other.shape == shard.shape and other.dtype == shard.dtype
    theirs = other.detach().reshape(-1)[: part.values.numel()]
    own = torch.tensor(same and torch.equal(part.values, theirs), device=part.values.device)
    return bool(part.exchange(own).amin() > 0)


def _single_number(shard: Tensor) -> Any:
    if spec_of([shard]).layout.numel != 1:
        raise NotImplementedError("more than one number")
    return _sum(shard, dtype=shard.dtype).item()


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum, "mean": _mean, "max": _max, "min": _min, "amax": _max, "amin": _min, "aminmax": _aminmax,
    "all": _all, "any": _any, "count_nonzero": _count_nonzero, "var": _var, "std": _std,
    "norm": _norm, "linalg_norm": _linalg_norm, "linalg_vector_norm": _vector_norm, "equal": _equal,
    "item": _single_number, "__float__": lambda shard: float(_single_number(shard)),
    "__int__": lambda shard: int(_single_number(shard)),
    "__bool__": lambda shard: "_zero_same" in shard.__dict__ or bool(_single_number(shard)),
    "is_nonzero": lambda shard: bool(_single_number(shard)),
}  # fmt: skip


def foreach_norms(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Run ``torch._foreach_norm`` with one collective for all shards of the list."""
    tensors, order = args[0], _order(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    with no_shard_dispatch():
        found: list[Tensor] = [torch.zeros(())] * len(tensors)
        own: dict[int, Tensor] = {}
        for number, tensor in enumerate(tensors):
            if "_zero_spec" in tensor.__dict__:
                own[number] = _local_norm(_LocalPart(tensor), order, dtype)
            else:
                found[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        spec = spec_of(tensors)
        numbers = torch.stack([norm.to(device=spec.device, dtype=torch.float64) for norm in own.values()])
        for number, norm in zip(own, _norm_of_norms(all_gather_shards(numbers, spec), order).unbind(), strict=True):
            found[number] = norm.to(tensors[number].device, (dtype or tensors[number].dtype).to_real())
    return found
