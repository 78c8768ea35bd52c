"""The update rule of Adafactor (Shazeer & Stern, 2018), as in ``torch.optim``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from lightning_zero.optim.matrix_rules import Tensors
from lightning_zero.optim.reduction_rules import COLUMNS, ROWS, Reduction, ReductionRule, column_shape, row_shape


@cache
def adafactor(eps: float | None = None, maximize: bool = False) -> ReductionRule:
    """Return the rule of ``torch.optim.Adafactor``.

    Args:
        eps: Lower bound of the root of the second moment; None: the resolution of the parameter's dtype.
        maximize: Ascend.
    """
    any_parameter = _variant(0.0, maximize, False)

    def by_parameter(shape: torch.Size, dtype: torch.dtype) -> ReductionRule:
        return _variant(torch.finfo(dtype).eps if eps is None else eps, maximize, len(shape) > 1)

    names = {"row_var": row_shape, "col_var": column_shape}
    return replace(any_parameter, state=("variance",), shared=names, by_parameter=by_parameter)


@cache
def _variant(eps: float, maximize: bool, factored: bool) -> ReductionRule:
    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        step = step.double()
        return {
            "keep": 1 - setting["lr"] * setting["weight_decay"],
            "rise": step ** setting["beta2_decay"],
            "size": torch.minimum(setting["lr"], step**-0.5),
            "least_rms": setting["eps.1"],
            "d": setting["d"],
        }

    def second_moment(grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensor:
        if factored:
            return values["row"] * values["column"]
        return torch.lerp(state["variance"], grad * grad, s["rise"])

    def update(grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensor:
        grad = -grad if maximize else grad
        return grad * second_moment(grad, state, s, values).clamp(min=eps * eps).rsqrt()

    def statistics(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensors:
        squares = grad * grad
        return {"weight": param * param} | ({"row": squares, "column": squares} if factored else {})

    def factors(sums: Tensors, shared: Tensors, s: Tensors, shape: torch.Size) -> tuple[Tensors, Tensors]:
        rms = (sums["weight"] / max(shape.numel(), 1)).sqrt()
        values = {"size": torch.maximum(s["least_rms"], rms) * s["size"]}
        if not factored:
            return values, {}
        row = torch.lerp(shared["row_var"], sums["row"] / shape[-1], s["rise"])
        column = torch.lerp(shared["col_var"], sums["column"] / shape[-2], s["rise"])
        scale = row.mean(-2, keepdim=True).clamp(min=eps)
        return values | {"row": row / scale, "column": column}, {"row_var": row, "col_var": column}

    def size(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensors:
        return {"update": update(grad, state, s, values).square()}

    def limit(sums: Tensors, shared: Tensors, s: Tensors, shape: torch.Size) -> tuple[Tensors, Tensors]:
        rms = (sums["update"] / max(shape.numel(), 1)).sqrt()
        return {"divisor": (rms / s["d"]).clamp(min=1.0)}, {}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> tuple[Tensor, Tensors]:
        way = update(grad, state, s, values) * (values["size"] / values["divisor"])
        new = {} if factored else {"variance": second_moment(grad, state, s, values)}
        return param * s["keep"] - way, new

    over = {"row": ROWS, "column": COLUMNS} if factored else {}
    return ReductionRule(
        ("lr", "beta2_decay", "eps.1", "d", "weight_decay"),
        () if factored else ("variance",),
        scalars,
        (Reduction(("weight", *over), statistics, factors, over), Reduction(("update",), size, limit)),
        apply,
        {"row_var": row_shape, "col_var": column_shape} if factored else {},
        ("step",),
    )
