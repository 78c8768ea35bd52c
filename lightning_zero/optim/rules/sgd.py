"""Steps along the gradient itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.rules.rule import Descent, Rule, Tensors

__all__ = ["asgd", "sgd"]


def sgd(group: Mapping[str, Any]) -> Rule:
    return _sgd(Descent.from_group(group), bool(group["momentum"]), group["nesterov"])


def asgd(group: Mapping[str, Any]) -> Rule:
    return _asgd(Descent.from_group(group))


@cache
def _sgd(descent: Descent, momentum: bool, nesterov: bool) -> Rule:
    """Momentum as in Sutskever et al. (2013), with the dampening that ``torch.optim.SGD`` documents."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["dampening"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {}
        if momentum:
            moved = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + grad * s["rise"]
            grad = grad + moved * s["momentum"] if nesterov else moved
        return param - grad * s["lr"], new

    names = ("momentum_buffer",) if momentum else ()
    return Rule(("lr", "momentum", "dampening", "weight_decay"), names, scalars, apply)


@cache
def _asgd(descent: Descent) -> Rule:
    """Averaged SGD (Polyak & Juditsky, 1992), with the schedules of ``torch.optim.ASGD``: each step goes by the size
    and the share that the one before it has left, so that a new learning rate counts one step later."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        lr, lambd, step = setting["lr"], setting["lambd"], step.double()
        return {
            "weight_decay": setting["weight_decay"],
            "shrink": 1 - lambd * setting["eta"],
            "size": setting["eta"],
            "share": setting["mu"],
            "eta": lr / (1 + lambd * lr * step) ** setting["alpha"],
            "mu": 1 / (step - setting["t0"]).clamp(min=1),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        param = param * s["shrink"] - grad * s["size"]
        average = state["ax"] + (param - state["ax"]) * s["share"]
        return param, {"ax": torch.where(s["share"] == 1, param, average)}

    return Rule(("lr", "lambd", "alpha", "t0", "weight_decay"), ("ax",), scalars, apply, counts=("eta", "mu"))
