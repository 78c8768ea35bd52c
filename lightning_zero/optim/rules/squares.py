"""Steps divided by the size that gradients have had."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from lightning_zero.optim.rules.rule import Descent, Rule, Tensors

__all__ = ["adadelta", "adagrad", "rmsprop"]


def adadelta(group: Mapping[str, Any]) -> Rule:
    return _adadelta(Descent.from_group(group))


def adagrad(group: Mapping[str, Any]) -> Rule:
    return _adagrad(Descent.from_group(group))


def rmsprop(group: Mapping[str, Any]) -> Rule:
    return _rmsprop(Descent.from_group(group), group["momentum"] > 0, bool(group["centered"]))


@cache
def _adadelta(descent: Descent) -> Rule:
    """Adadelta (Zeiler, 2012, algorithm 1), times the learning rate that ``torch.optim.Adadelta`` adds."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["rho"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        square = state["square_avg"] * s["rho"] + grad * grad * s["rise"]
        delta = (state["acc_delta"] + s["eps"]).sqrt() / (square + s["eps"]).sqrt() * grad
        moved = state["acc_delta"] * s["rho"] + delta * delta * s["rise"]
        return param - delta * s["lr"], {"square_avg": square, "acc_delta": moved}

    return Rule(("lr", "rho", "eps", "weight_decay"), ("square_avg", "acc_delta"), scalars, apply)


@cache
def _adagrad(descent: Descent) -> Rule:
    """Adagrad (Duchi, Hazan & Singer, 2011), with the decay of the rate that ``torch.optim.Adagrad`` documents."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "size": setting["lr"] / (1 + (step.double() - 1) * setting["lr_decay"])}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        total = state["sum"] + grad * grad
        return param - s["size"] * grad / (total.sqrt() + s["eps"]), {"sum": total}

    return Rule(("lr", "lr_decay", "eps", "weight_decay"), ("sum",), scalars, apply)


@cache
def _rmsprop(descent: Descent, momentum: bool, centered: bool) -> Rule:
    """RMSprop (Hinton's lecture 6, 2012); by the variance instead of the square if ``centered`` (Graves, 2013)."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["alpha"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        square = state["square_avg"] * s["alpha"] + grad * grad * s["rise"]
        new = {"square_avg": square}
        if centered:
            mean = new["grad_avg"] = state["grad_avg"] + (grad - state["grad_avg"]) * s["rise"]
            square = square - mean * mean
        move = grad / (square.sqrt() + s["eps"])
        if momentum:
            move = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + move
        return param - move * s["lr"], new

    names = ("square_avg",) + (("momentum_buffer",) if momentum else ()) + (("grad_avg",) if centered else ())
    return Rule(("lr", "alpha", "eps", "momentum", "weight_decay"), names, scalars, apply)
