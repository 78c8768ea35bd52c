"""Steps by the gradient's sign."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.rules.rule import Descent, Rule, Tensors

__all__ = ["rprop"]


def rprop(group: Mapping[str, Any]) -> Rule:
    return _rprop(Descent.from_group(group))


@cache
def _rprop(descent: Descent) -> Rule:
    """Rprop (Riedmiller & Braun, 1993) as in ``torch.optim``: where the sign has changed, the element rests a step. The
    learning rate is only the first step's size."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return dict(setting)

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        agreement = grad * state["prev"]
        factor = torch.where(agreement < 0, s["etas.0"], torch.where(agreement > 0, s["etas.1"], 1.0))
        size = (state["step_size"] * factor).clamp(s["step_sizes.0"], s["step_sizes.1"])
        grad = torch.where(agreement < 0, 0.0, grad)
        return param - grad.sign() * size, {"prev": grad, "step_size": size}

    settings = ("etas.0", "etas.1", "step_sizes.0", "step_sizes.1")
    return Rule(settings, ("prev", "step_size"), scalars, apply)
