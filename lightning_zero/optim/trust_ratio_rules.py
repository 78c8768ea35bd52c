"""The update rules of LAMB and LARS, which scale each update by a ratio of norms.

LAMB: You et al., "Large batch optimization for deep learning", 2020. LARS: You et al., "Large batch training of
convolutional networks", 2017.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from lightning_zero.optim.matrix_rules import Tensors
from lightning_zero.optim.reduction_rules import Reduction, ReductionRule


@cache
def lamb(
    decay: bool = False,
    fixed_decay: bool = False,
    averaging: bool = True,
    scaled: bool = True,
    debias: bool = True,
    maximize: bool = False,
    max_weight_norm: float = 10.0,
) -> ReductionRule:
    """Return the rule of LAMB, as in ``pytorch_optimizer.Lamb`` from version 4 on.

    Args:
        decay: Shrink the weights by ``lr * weight_decay`` before their norm is taken.
        fixed_decay: Shrink by ``weight_decay`` instead.
        averaging: Scale gradients by ``1 - beta1`` in the first moment.
        scaled: Scale the update by the ratio of norms.
        debias: Divide the learning rate by ``1 - beta1 ** step``. The second moment has no bias correction.
        maximize: Ascend.
        max_weight_norm: Upper limit of the weights' norm in the ratio.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        shrink = setting["weight_decay"] * (1.0 if fixed_decay else setting["lr"])
        return {
            "lr": setting["lr"] / (1 - setting["betas.0"] ** step.double()) if debias else setting["lr"],
            "beta1": setting["betas.0"],
            "rise1": 1 - setting["betas.0"] if averaging else torch.ones_like(setting["lr"]),
            "beta2": setting["betas.1"],
            "rise2": 1 - setting["betas.1"],
            "eps": setting["eps"],
            "keep": 1 - shrink if decay else torch.ones_like(setting["lr"]),
        }

    def moments(grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        grad = -grad if maximize else grad
        first = state["exp_avg"] * s["beta1"] + grad * s["rise1"]
        second = state["exp_avg_sq"] * s["beta2"] + grad * grad * s["rise2"]
        return first / (second.sqrt() + s["eps"]), {"exp_avg": first, "exp_avg_sq": second}

    def terms(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> Tensors:
        update, _ = moments(grad, state, s)
        return {"weight": (param * s["keep"]).square(), "update": update.square()}

    def ratio(sums: Tensors, shared: Tensors, s: Tensors, shape: torch.Size) -> tuple[Tensors, Tensors]:
        weight, update = sums["weight"].sqrt().clamp(max=max_weight_norm), sums["update"].sqrt()
        found = torch.where((weight == 0) | (update == 0), 1.0, weight / (update + s["eps"]))
        return {"ratio": found if scaled else torch.ones_like(found)}, {}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors, values: Tensors) -> tuple[Tensor, Tensors]:
        update, new = moments(grad, state, s)
        return param * s["keep"] - update * (s["lr"] * values["ratio"]), new

    return ReductionRule(
        ("lr", "betas.0", "betas.1", "eps", "weight_decay"),
        ("exp_avg", "exp_avg_sq"),
        scalars,
        (Reduction(("weight", "update"), terms, ratio),),
        apply,
        counts=("step",),
    )


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
