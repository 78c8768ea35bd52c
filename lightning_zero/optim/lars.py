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

    Weight decay is part of the divisor, as in the paper and in ``pytorch_optimizer.LARS`` from version 4 on.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["dampening"]}

    def terms(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensors:
        return {"weight": param.square(), "gradient": grad.square()}

    def ratio(sums: Tensors, shared: Tensors, s: Tensors, shape: torch.Size) -> tuple[Tensors, Tensors]:
        weight = sums["weight"].sqrt()
        divisor = sums["gradient"].sqrt() + s["weight_decay"] * weight
        return {"ratio": torch.where((weight > 0) & (divisor > 0), s["trust_coefficient"] * weight / divisor, 1.0)}, {}

    def make(is_scaled: bool) -> ReductionRule:
        def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> tuple[Tensor, Tensors]:
            way, new = -grad if maximize else grad, {}
            if is_scaled:
                way = (way + param * s["weight_decay"]) * values["ratio"]
            if momentum:
                average = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + way * s["rise"]
                way = way + average * s["momentum"] if nesterov else average
            return param - way * s["lr"], new

        return ReductionRule(
            ("lr", "momentum", "dampening", "weight_decay", "trust_coefficient"),
            ("momentum_buffer",) if momentum else (),
            scalars,
            (Reduction(("weight", "gradient"), terms, ratio),) if is_scaled else (),
            apply,
        )

    vectors, matrices = make(False), make(True)
    return replace(matrices, by_parameter=lambda shape, dtype: matrices if len(shape) > 1 else vectors)
