"""Update rules as pure functions of tensors, so that a captured graph can step with any learning rate.

An optimizer's own step reads learning rate and betas as floats, which a captured graph would keep for ever. Here they
are tensors. A rule has two halves: ``scalars`` turns a group's settings and the step count into a few numbers, in
float64 because ``1 - beta`` loses what float32 can hold; ``apply`` treats elements one by one, in float32 whatever the
dtype of the weights, as the fused kernels of ``torch.optim`` do. What depends on a number of the device is chosen with
``torch.where``: a graph has no branches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_zero.optim.formulas.moments import adam, adamax, adamw, nadam, radam
from lightning_zero.optim.formulas.rule import Rule
from lightning_zero.optim.formulas.sgd import asgd, sgd
from lightning_zero.optim.formulas.sign import rprop
from lightning_zero.optim.formulas.squares import adadelta, adagrad, rmsprop

__all__ = ["Rule", "rule_for"]

_RULES: Mapping[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], Rule]] = {
    torch.optim.Adadelta: adadelta,
    torch.optim.Adagrad: adagrad,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.Adamax: adamax,
    torch.optim.ASGD: asgd,
    torch.optim.NAdam: nadam,
    torch.optim.RAdam: radam,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Rprop: rprop,
    torch.optim.SGD: sgd,
}


def rule_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule | None:
    """The rule by which this optimizer steps this group; None where we have none, as for subclasses, which may do
    anything."""
    make = _RULES.get(type(optimizer))
    return None if make is None or group.get("differentiable") else make(group)
