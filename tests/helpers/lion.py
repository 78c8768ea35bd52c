"""An optimizer of a third party's, and the rule that makes it known.

The one that `register_rule` documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import lightning_zero
from lightning_zero import Rule

__all__ = ["Lion", "lion"]


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                way = average.lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(way, alpha=-group["lr"])
                average.lerp_(param.grad, 1 - beta2)
        return loss


@cache
def lion() -> Rule:
    def scalars(setting: dict[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        return {**setting, "rise": 1 - setting["betas.0"], "rise2": 1 - setting["betas.1"]}

    def apply(
        param: Tensor, grad: Tensor, state: dict[str, Tensor], s: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        average = state["exp_avg"]
        way = (average + (grad - average) * s["rise"]).sign()
        new = {"exp_avg": average + (grad - average) * s["rise2"]}
        return param * (1 - s["lr"] * s["weight_decay"]) - way * s["lr"], new

    return Rule(("lr", "betas.0", "betas.1", "weight_decay"), ("exp_avg",), scalars, apply)


def make_lion(group: Any) -> Rule:
    return lion()


lightning_zero.register_rule(Lion, make_lion)
