"""Rules of other libraries' optimizers, found by the names of their classes without an import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.matrix_rules import MatrixRule
from lightning_zero.optim.reduction_rules import ReductionRule
from lightning_zero.optim.soap import soap
from lightning_zero.optim.trust_ratio_rules import lamb, lars

Group = Mapping[str, Any]
MakeLibraryRule = Callable[[torch.optim.Optimizer, Group], MatrixRule | ReductionRule]


def _lamb(optimizer: torch.optim.Optimizer, group: Group) -> ReductionRule:
    for name in ("rectify", "adanorm"):
        _refuse(bool(group.get(name)), optimizer, f"{name}=True")
    _refuse(bool(getattr(optimizer, "pre_norm", False)), optimizer, "pre_norm=True")
    decays = group["weight_decay"] != 0
    _refuse(decays and not group["weight_decouple"], optimizer, "weight_decouple=False")
    most = float(getattr(optimizer, "clamp", 10.0))
    return lamb(
        decays,
        bool(group["fixed_decay"]),
        averaging=bool(group["grad_averaging"]),
        scaled=not group["adam"],
        debias=not group.get("adam_debias", False),
        maximize=_ascends(optimizer),
        max_weight_norm=most,
    )


def _lars(optimizer: torch.optim.Optimizer, group: Group) -> ReductionRule:
    return lars(group["momentum"] > 0, bool(group["nesterov"]), _ascends(optimizer))


def _soap(optimizer: torch.optim.Optimizer, group: Group) -> MatrixRule:
    _refuse(bool(group["merge_dims"]), optimizer, "merge_dims=True")
    _refuse(_ascends(optimizer), optimizer, "maximize=True")
    return soap(group)


def _ascends(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "maximize", False))


def _refuse(condition: bool, optimizer: torch.optim.Optimizer, option: str) -> None:
    if condition:
        raise UnsupportedError(
            f"{type(optimizer).__name__} has {option}, which its rule for sharded parameters does not compute. Leave "
            "the option out, or register a rule for a subclass of your own with lightning_zero.register_matrix_rule."
        )


_RULES: Mapping[str, MakeLibraryRule] = {
    "pytorch_optimizer.optimizer.lamb.Lamb": _lamb,
    "pytorch_optimizer.optimizer.lars.LARS": _lars,
    "pytorch_optimizer.optimizer.soap.SOAP": _soap,
}


def library_rule(optimizer: type[torch.optim.Optimizer]) -> MakeLibraryRule | None:
    """Return the function that makes the rule of this class; None if unknown, as for subclasses."""
    return _RULES.get(f"{optimizer.__module__}.{optimizer.__qualname__}")
