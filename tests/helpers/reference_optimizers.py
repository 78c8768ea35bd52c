"""Optimizers of whole parameters in plain torch: oracles for the rules on shards.

The first two have the names and options of classes of ``pytorch_optimizer``, by which their rules are found. They are
written from the papers, and ``examples/benchmarks/optimizer_rules.py`` compares the rules with the package itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LARS", "Lamb"]


class Oracle(torch.optim.Optimizer):
    """Steps each parameter with a gradient by :meth:`change`."""

    maximize = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                grad = -param.grad if self.maximize else param.grad
                self.change(param, grad, group, self.state[param])
        return loss

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Oracle):
    """LAMB without bias correction, and with a limit for the norm of the weights."""

    clamp = 10.0
    pre_norm = False

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.0, **options: Any) -> None:
        defaults = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decouple": True, "fixed_decay": False, "rectify": False}
        defaults |= {"grad_averaging": True, "adam": False}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | defaults | options)

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        if not state:
            state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.mul_(1 - group["weight_decay"] * (1 if group["fixed_decay"] else group["lr"]))
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps)
        weight, size = min(float(param.norm()), self.clamp), float(update.norm())
        ratio = 1.0 if group["adam"] or not weight or not size else weight / (size + eps)
        param.sub_(update, alpha=group["lr"] * ratio)


class LARS(Oracle):
    """LARS whose momentum begins as the first gradient, before weight decay and before its sign changes."""

    def __init__(self, params: Any, lr: float = 0.5, momentum: float = 0.9, **options: Any) -> None:
        defaults = {"weight_decay": 0.1, "dampening": 0.2, "trust_coefficient": 0.02, "nesterov": False}
        super().__init__(params, {"lr": lr, "momentum": momentum} | defaults | options)

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        way = grad
        if param.ndim > 1:
            weight, size = float(param.norm()), float(grad.norm())
            ratio = group["trust_coefficient"] * weight / size if weight and size else 1.0
            way = (grad + group["weight_decay"] * param) * ratio
        if group["momentum"]:
            assert param.grad is not None
            average = state.setdefault("momentum_buffer", param.grad.clone())
            average.mul_(group["momentum"]).add_(way, alpha=1 - group["dampening"])
            way = way + group["momentum"] * average if group["nesterov"] else average
        param.sub_(way, alpha=group["lr"])


for _cls in (Lamb, LARS):  # the names by which rules of libraries are found
    _cls.__module__ = f"pytorch_optimizer.optimizer.{_cls.__name__.lower()}"
