"""The update rule of LARS (You et al., "Large batch training of convolutional networks", 2017)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from lightning_zero.optim.matrix_rules import Tensors
from lightning_zero.optim.reduction_rules import Reduction, ReductionRule


@cache
def lars(momentum: bool = True, nesterov: bool = False, maximize: bool = False) -> ReductionRule:
    """Return the rule of LARS. Parameters of one dimension are stepped by SGD, without weight decay.

    Momentum begins as the first gradient, as in ``pytorch_optimizer.LARS``.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["dampening"]}

    def terms(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensors:
        # The momentum is zero before the first step only. A step count would not be in checkpoints of the library.
        past = {"momentum": state["momentum_buffer"].square()} if momentum else {}
        return {"weight": param.square(), "gradient": grad.square(), **past}

    def ratio(sums: Tensors, shared: Tensors, s: Tensors, shape: torch.Size) -> tuple[Tensors, Tensors]:
        weight, grad = sums["weight"].sqrt(), sums["gradient"].sqrt()
        values = {"ratio": torch.where((weight > 0) & (grad > 0), s["trust_coefficient"] * weight / grad, 1.0)}
        return (values | {"begins": (sums["momentum"] == 0).to(grad.dtype)} if momentum else values), {}

    names = ("weight", "gradient", *(("momentum",) if momentum else ()))

    def make(is_scaled: bool) -> ReductionRule:
        def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> tuple[Tensor, Tensors]:
            way, new = -grad if maximize else grad, {}
            if is_scaled:
                way = (way + param * s["weight_decay"]) * values["ratio"]
            if momentum:
                before = torch.where(values["begins"] > 0, grad, state["momentum_buffer"])
                average = new["momentum_buffer"] = before * s["momentum"] + way * s["rise"]
                way = way + average * s["momentum"] if nesterov else average
            return param - way * s["lr"], new

        return ReductionRule(
            ("lr", "momentum", "dampening", "weight_decay", "trust_coefficient"),
            ("momentum_buffer",) if momentum else (),
            scalars,
            (Reduction(names, terms, ratio),),
            apply,
        )

    vectors, matrices = make(False), make(True)
    return replace(matrices, by_parameter=lambda shape, dtype: matrices if len(shape) > 1 else vectors)
