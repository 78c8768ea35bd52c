"""Adam and its relatives, which follow the gradient's first two moments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.rules.rule import Descent, Rule, Tensors

__all__ = ["adam", "adamax", "adamw", "nadam", "radam"]

_SETTINGS = ("lr", "betas.0", "betas.1", "eps", "weight_decay")
_STATE = ("exp_avg", "exp_avg_sq")


def adam(group: Mapping[str, Any]) -> Rule:
    return _adam(Descent.from_group(group), group["amsgrad"])


def adamw(group: Mapping[str, Any]) -> Rule:
    return _adam(Descent.from_group(group, decoupled=True), group["amsgrad"])


def adamax(group: Mapping[str, Any]) -> Rule:
    return _adamax(Descent.from_group(group))


def nadam(group: Mapping[str, Any]) -> Rule:
    return _nadam(Descent.from_group(group))


def radam(group: Mapping[str, Any]) -> Rule:
    return _radam(Descent.from_group(group))


def _constants(setting: Tensors) -> Tensors:
    """What does not depend on the step count."""
    beta1, beta2 = setting["betas.0"], setting["betas.1"]
    return {
        "keep": 1 - setting["lr"] * setting["weight_decay"],
        "weight_decay": setting["weight_decay"],
        "rise1": 1 - beta1,
        "beta2": beta2,
        "rise2": 1 - beta2,
        "eps": setting["eps"],
    }


def _first(grad: Tensor, state: Tensors, s: Tensors) -> Tensor:
    return state["exp_avg"] + (grad - state["exp_avg"]) * s["rise1"]


def _second(grad: Tensor, state: Tensors, s: Tensors) -> Tensor:
    return state["exp_avg_sq"] * s["beta2"] + grad * grad * s["rise2"]


@cache
def _adam(descent: Descent, amsgrad: bool) -> Rule:
    """Adam (Kingma & Ba, 2015, algorithm 1), with decay as in AdamW (Loshchilov & Hutter, 2019) if decoupled."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        step = step.double()
        return {
            **_constants(setting),
            "size": setting["lr"] / (1 - setting["betas.0"] ** step),
            "root": (1 - setting["betas.1"] ** step).sqrt(),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        second = new["exp_avg_sq"]
        if amsgrad:
            second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
        return param - s["size"] * new["exp_avg"] / (second.sqrt() / s["root"] + s["eps"]), new

    return Rule(_SETTINGS, _STATE + (("max_exp_avg_sq",) if amsgrad else ()), scalars, apply)


@cache
def _adamax(descent: Descent) -> Rule:
    """AdaMax (Kingma & Ba, 2015, algorithm 2), whose maximum ``torch.optim`` keeps from zero by ``eps``."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**_constants(setting), "size": setting["lr"] / (1 - setting["betas.0"] ** step.double())}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        largest = torch.maximum(state["exp_inf"] * s["beta2"], grad.abs() + s["eps"])
        new = {"exp_avg": _first(grad, state, s), "exp_inf": largest}
        return param - s["size"] * new["exp_avg"] / largest, new

    return Rule(_SETTINGS, ("exp_avg", "exp_inf"), scalars, apply)


@cache
def _nadam(descent: Descent) -> Rule:
    """NAdam (Dozat, 2016): Adam with Nesterov's momentum, whose schedule the product of past momenta corrects."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        lr, beta1, step = setting["lr"], setting["betas.0"], step.double()

        def momentum(step: Tensor) -> Tensor:
            return beta1 * (1 - 0.5 * 0.96 ** (step * setting["momentum_decay"]))

        now, then = momentum(step), momentum(step + 1)
        product = setting["mu_product"] * now
        return {
            **_constants(setting),
            "mu_product": product,
            "size_of_gradient": lr * (1 - now) / (1 - product),
            "size_of_average": lr * then / (1 - product * then),
            "root": (1 - setting["betas.1"] ** step).sqrt(),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        ahead = grad * s["size_of_gradient"] + new["exp_avg"] * s["size_of_average"]
        return param - ahead / (new["exp_avg_sq"].sqrt() / s["root"] + s["eps"]), new

    return Rule((*_SETTINGS, "momentum_decay"), _STATE, scalars, apply, counts=("mu_product",))


@cache
def _radam(descent: Descent) -> Rule:
    """RAdam (Liu et al., 2020, algorithm 2): momentum alone until the second moment is of enough gradients."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        beta1, beta2, step = setting["betas.0"], setting["betas.1"], step.double()
        most = 2 / (1 - beta2) - 1
        length = most - 2 * step * beta2**step / (1 - beta2**step)
        enough = length > 5
        rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length) * (1 - beta2**step)
        size = setting["lr"] / (1 - beta1**step)
        return {
            **_constants(setting),
            "enough": enough.double(),
            "size": torch.where(enough, size * rectified.sqrt(), size),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        divisor = torch.where(s["enough"] > 0, new["exp_avg_sq"].sqrt() + s["eps"], 1.0)
        return param - s["size"] * new["exp_avg"] / divisor, new

    return Rule(_SETTINGS, _STATE, scalars, apply)
