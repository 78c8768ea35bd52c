"""Update rules as pure functions of tensors, so that a captured graph can step with any learning rate.

An optimizer's own step reads learning rate and betas as floats, which a captured graph would freeze. A :class:`Rule`
reads tensors and has two parts. ``scalars`` turns a group's settings and the step count into a few numbers, in float64
because float32 loses ``1 - beta``. ``apply`` updates elements in float32, whatever the dtype of the weights, as the
fused kernels of ``torch.optim`` do. Choices by a device value use ``torch.where``: a graph has no branches.

To add an optimizer of ``torch.optim``, write its rule next to similar ones and add a line to ``_RULES``. For other
optimizers use :func:`register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lightning_zero.optim.rules.moments import adam, adamax, adamw, nadam, radam
from lightning_zero.optim.rules.rule import Rule, StateNames
from lightning_zero.optim.rules.sgd import asgd, sgd
from lightning_zero.optim.rules.sign import rprop
from lightning_zero.optim.rules.squares import adadelta, adagrad, rmsprop

__all__ = ["MakeRule", "Rule", "StateNames", "has_rules", "register_rule", "rule_for", "state_names"]

MakeRule = Callable[[Mapping[str, Any]], Rule]

_ATTRIBUTE = "_zero_rule"  # attribute of an optimizer class
_RULES: Mapping[type[torch.optim.Optimizer], MakeRule] = {
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
    """Return the rule by which this optimizer steps this group; None if unknown, as for subclasses."""
    make = _RULES.get(type(optimizer)) or type(optimizer).__dict__.get(_ATTRIBUTE)
    return None if make is None or group.get("differentiable") else make(group)


def has_rules(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if there is a rule for each of these groups."""
    return all(rule_for(optimizer, group) is not None for group in groups)


def state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> StateNames:
    """Return the names in this optimizer's state for the parameters of this group, as far as known."""
    for cls in type(optimizer).__mro__:
        ours, registered = _RULES.get(cls), cls.__dict__.get(_ATTRIBUTE)
        make = ours or registered
        if make is None:
            continue
        if cls is type(optimizer):
            # A registered rule names all elementwise state. For torch's optimizers, users' hooks may add state, and
            # settings that have changed may have left state that the rule does not read.
            rule = make(group)
            return StateNames(frozenset(rule.state), frozenset(rule.counts), complete=ours is None)
        try:
            return StateNames(frozenset(), frozenset(make(group).counts), complete=False)
        except KeyError:  # a subclass with other settings
            break
    return StateNames(frozenset(), frozenset(), complete=False)


def register_rule(optimizer: type[torch.optim.Optimizer], make: MakeRule) -> None:
    """Register the update rule of an elementwise optimizer, so that its step can be captured.

    The optimizer's ``step`` makes the first step, and with it the state. The rule computes later steps, and ``step`` is
    then called without parameters. Call this before training, on every rank. Subclasses need rules of their own::

        @functools.cache
        def lion():
            def scalars(setting, step):
                return {**setting, "rise": 1 - setting["betas.0"], "rise2": 1 - setting["betas.1"]}

            def apply(param, grad, state, s):
                average = state["exp_avg"]
                way = (average + (grad - average) * s["rise"]).sign()
                new = {"exp_avg": average + (grad - average) * s["rise2"]}
                return param * (1 - s["lr"] * s["weight_decay"]) - way * s["lr"], new

            return Rule(("lr", "betas.0", "betas.1", "weight_decay"), ("exp_avg",), scalars, apply)


        lightning_zero.register_rule(Lion, lambda group: lion())

    Args:
        optimizer: The class itself.
        make: Returns the :class:`Rule` for a parameter group. The rule may depend on non-numeric settings and on which
            settings are zero. Return one object for all groups that agree in these, so that they share compiled code.
            Checkpoints depend on the names in it, see :class:`Rule`.

    Raises:
        ValueError: ``optimizer`` is no optimizer class, or has another rule already.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(f"{optimizer!r} is no class of optimizers. Pass the class, such as Lion, and not an object.")
    known = _RULES.get(optimizer) or optimizer.__dict__.get(_ATTRIBUTE)
    if known is not None and known is not make:
        raise ValueError(
            f"{optimizer.__name__} has another rule already ({known!r}). Register yours for a subclass of it."
        )
    setattr(optimizer, _ATTRIBUTE, make)
