"""Update rules as pure functions of tensors, so that a captured graph can step with any learning rate.

An optimizer's own step reads learning rate and betas as floats, which a captured graph would keep for ever. Here they
are tensors. A rule has two halves: ``scalars`` turns a group's settings and the step count into a few numbers, in
float64 because ``1 - beta`` loses what float32 can hold; ``apply`` treats elements one by one, in float32 whatever the
dtype of the weights, as the fused kernels of ``torch.optim`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rule", "rule_for"]

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """How one optimizer changes elements.

    Attributes:
        settings: the floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: names of the state tensors of a parameter's shape.
        scalars: (settings, all 0-dim float64; step count after this step, 0-dim) -> 0-dim float64 tensors.
        apply: (parameter, gradient, state, scalars; all float32) -> (new parameter, new state).
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    apply: Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]


def rule_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule | None:
    """The rule by which this optimizer steps this group; None where we have none, as for subclasses, which may do
    anything."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not group.get("differentiable"):
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return _adam(bool(group["weight_decay"]), decoupled, group["amsgrad"], group["maximize"])
    if type(optimizer) is torch.optim.SGD and not group.get("differentiable"):
        return _sgd(bool(group["weight_decay"]), bool(group["momentum"]), group["nesterov"], group["maximize"])
    return None


@cache
def _adam(decay: bool, decoupled: bool, amsgrad: bool, maximize: bool) -> Rule:
    """Adam (Kingma & Ba, 2015, algorithm 1), with decay as in AdamW (Loshchilov & Hutter, 2019) if ``decoupled``."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        lr, beta1, beta2 = setting["lr"], setting["betas.0"], setting["betas.1"]
        step = step.double()
        return {
            "keep": 1 - lr * setting["weight_decay"],
            "decay": setting["weight_decay"],
            "rise1": 1 - beta1,
            "beta2": beta2,
            "rise2": 1 - beta2,
            "size": lr / (1 - beta1**step),
            "root": (1 - beta2**step).sqrt(),
            "eps": setting["eps"],
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        grad = -grad if maximize else grad
        if decay and decoupled:
            param = param * s["keep"]
        elif decay:
            grad = grad + param * s["decay"]
        new = {"exp_avg": state["exp_avg"] + (grad - state["exp_avg"]) * s["rise1"]}
        new["exp_avg_sq"] = state["exp_avg_sq"] * s["beta2"] + grad * grad * s["rise2"]
        second = new["exp_avg_sq"]
        if amsgrad:
            second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
        return param - s["size"] * new["exp_avg"] / (second.sqrt() / s["root"] + s["eps"]), new

    names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ())
    return Rule(("lr", "betas.0", "betas.1", "eps", "weight_decay"), names, scalars, apply)


@cache
def _sgd(decay: bool, momentum: bool, nesterov: bool, maximize: bool) -> Rule:
    """Momentum as in Sutskever et al. (2013), with the dampening that ``torch.optim.SGD`` documents."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["dampening"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        grad = -grad if maximize else grad
        if decay:
            grad = grad + param * s["weight_decay"]
        new = {}
        if momentum:
            moved = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + grad * s["rise"]
            grad = grad + moved * s["momentum"] if nesterov else moved
        return param - grad * s["lr"], new

    names = ("momentum_buffer",) if momentum else ()
    return Rule(("lr", "momentum", "dampening", "weight_decay"), names, scalars, apply)
