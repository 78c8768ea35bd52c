"""Checks of optimizers: can they step shards, and be captured or offloaded?

An optimizer sees a flat part of each parameter. That is enough for an elementwise rule. A rule that needs a parameter's
shape, or a norm over it, would silently compute a different result, so such optimizers are rejected by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.library_8bit import check_library_8bit
from lightning_zero.optim.reduction_rules import ReductionRule, check_rows
from lightning_zero.optim.update_rules import MatrixRule, has_rules, needs_matrices, rule_for
from lightning_zero.sharding.shard_tensor import without_shard_dispatch

# Advice in errors about optimizers that would train wrongly.
INSTEAD = "Use an optimizer that treats elements one by one, such as AdamW, Adam, SGD or Lion, or another strategy."
OTHERS = (
    "torch.optim.Muon and torch.optim.Adafactor themselves work, and others by lightning_zero.register_matrix_rule."
)
_MUONS = (
    "torch.optim.Muon itself works. If {0} computes the same, import muon from lightning_zero.optim.matrix_rules, and "
    "write lightning_zero.register_matrix_rule({0}, muon). For a class that has groups of other parameters, too, see "
    "the recipe of Muon in the documentation."
)

_NEEDS_FULL_PARAMETERS = {
    "Muon": "orthogonalizes full matrices",
    "Dion": "orthogonalizes full matrices",
    "Adafactor": "keeps row and column statistics of full matrices",
    "AdaFactor": "keeps row and column statistics of full matrices",
    "CAME": "keeps row and column statistics of full matrices",
    "SM3": "keeps row and column statistics of full matrices",
    "Shampoo": "preconditions with full matrices",
    "SOAP": "preconditions with full matrices",
    "KFAC": "preconditions with full matrices",
    "PSGD": "preconditions with full matrices",
    "GaLore": "projects full matrices",
    "LAMB": "scales by the norm of full parameters",
    "Lamb": "scales by the norm of full parameters",
    "LARS": "scales by the norm of full parameters",
    "AdamP": "projects on full parameters",
    "SGDP": "projects on full parameters",
    "LBFGS": "takes inner products over all parameters",
    "Prodigy": "takes inner products over all parameters",
    "DAdapt": "takes inner products over all parameters",
    "NovoGrad": "normalizes by the norm of full gradients",
    "AdamMini": "shares statistics over blocks of full parameters",
    "Adam_mini": "shares statistics over blocks of full parameters",
    "SparseAdam": "steps the rows that sparse gradients name",
}
# Matched anywhere in the class name, such as SingleDeviceMuonWithAuxAdam.
_FAMILIES = ("GaLore", "Muon", "Shampoo", "Adafactor", "AdaFactor", "DAdapt")


def is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the class is one of torch's own, not a subclass."""
    return type(optimizer).__module__.startswith("torch.optim.")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`UnsupportedError` for an optimizer that cannot step shards.

    It needs full parameters, quantizes its state, or has an inner optimizer.
    """
    check_library_8bit(optimizer)
    own = type(optimizer).__name__
    for cls in () if needs_matrices(optimizer) else type(optimizer).__mro__:
        name = cls.__name__
        reason = _NEEDS_FULL_PARAMETERS.get(next((family for family in _FAMILIES if family in name), name))
        if reason is not None:
            raise UnsupportedError(
                f"{own} {reason}, but each rank holds only a flat piece of every parameter, so it "
                f"would train wrongly. {INSTEAD} {_MUONS.format(own) if 'Muon' in name else OTHERS}"
            )
    inner = next((type(v).__name__ for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)), None)
    if inner is not None:
        raise UnsupportedError(
            f"{own} steps parameters by another optimizer that it holds ({inner}), whose state no checkpoint of "
            f"sharded parameters would hold. Return the {inner} itself from configure_optimizers(), or put the rule "
            f"of {own} into a subclass of it."
        )
    if "_optimizer_step_post_hooks" not in vars(optimizer):
        raise UnsupportedError(
            f"{own} has not called torch.optim.Optimizer.__init__(), so its steps have no hooks, in which shards are "
            "made ready. Call super().__init__(params, defaults) in its __init__."
        )
    steps = any(group["params"] for group in optimizer.param_groups)  # Lightning has an optimizer without parameters
    if steps and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        check_state_dict(optimizer, optimizer.state_dict())


def large_tensors(value: Any) -> list[Tensor]:
    """Return the tensors with more than one element anywhere in ``value``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel() > 1]


def check_state_dict(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    """Raise :class:`UnsupportedError` if checkpoints could not hold all of an optimizer's state dict."""
    name = type(optimizer).__name__
    if not (isinstance(packed, Mapping) and isinstance(packed.get("state"), Mapping) and "param_groups" in packed):
        keys = ", ".join(map(repr, packed)) if isinstance(packed, Mapping) else type(packed).__name__
        raise UnsupportedError(
            f"The state_dict() of {name} is {{{keys}}}, not 'state' and 'param_groups' as torch.optim's, so it "
            f"cannot be assembled from the shards of all ranks. {INSTEAD}"
        )
    numbers = range(sum(len(group["params"]) for group in optimizer.param_groups))
    extra: dict[Any, Any] = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    extra |= {key: value for key, value in packed["state"].items() if key not in numbers}
    for group in packed["param_groups"]:
        extra |= {key: value for key, value in group.items() if key != "params"}
    for key, value in extra.items():
        if large := large_tensors(value):
            raise UnsupportedError(
                f"The state_dict() of {name} holds {key!r} with a tensor of shape {tuple(large[0].shape)} that belongs "
                "to no parameter's state, so a checkpoint would hold only rank 0's part. Keep such tensors in "
                f"optimizer.state[param]. {INSTEAD}"
            )


def check_capture(optimizer: torch.optim.Optimizer, reason: str | None, option: str) -> None:
    """Raise :class:`UnsupportedError` if ``reason`` prevents the capture that ``option=True`` requires."""
    if reason is not None:
        raise UnsupportedError(
            f"{option}=True, but the step of {type(optimizer).__name__} cannot be captured: {reason}. "
            f"Pass {option}='auto' to step it eagerly."
        )


def check_matrices(optimizer: torch.optim.Optimizer, find: Callable[[Tensor], Any], masters_on_host: bool) -> None:
    """Raise :class:`UnsupportedError` if an optimizer of matrices cannot step its parameters."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        rule = rule_for(optimizer, group)
        if not isinstance(rule, MatrixRule | ReductionRule):
            continue
        missing = [key for key in rule.settings if key.removesuffix(".0").removesuffix(".1") not in group]
        if missing:
            raise UnsupportedError(
                f"The rule of {name} reads the settings {missing}, which a parameter group does not have. Name those "
                f"of the group in the rule: {sorted(set(group) - {'params'})}."
            )
        if masters_on_host:
            raise UnsupportedError(
                f"offload=('optimizer', 'parameters') steps parameters in chunks, but {name} needs full parameters. "
                "Pass offload=('optimizer',)."
            )
        for param in group["params"]:
            record = find(param)
            if record is None:
                continue
            if isinstance(rule, MatrixRule):
                rule.matrices(record.layout.shape)  # raises for vectors
            else:
                for reduction in rule.of(record.layout.shape, param.dtype).reductions:
                    check_rows(record.layout, reduction.over, record.name)
            if param.is_complex():
                raise UnsupportedError(
                    f"{name} cannot step {record.name!r}, which is complex. Give it to another optimizer, such as Adam."
                )


def check_offload(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`UnsupportedError` if the optimizer's state cannot be offloaded."""
    if not has_rules(optimizer, optimizer.param_groups):
        raise UnsupportedError(
            f"offload=('optimizer',) steps parameters in chunks, which needs the update rule of "
            f"{type(optimizer).__name__}. The rule is not known (only elementwise ones of torch.optim, no subclasses). "
            "Register it with lightning_zero.register_rule, or leave 'optimizer' out of offload."
        )
    if any(isinstance(rule_for(optimizer, group), ReductionRule) for group in optimizer.param_groups):
        raise UnsupportedError(
            f"offload=('optimizer',) copies state to the device once per step, but {type(optimizer).__name__} reads it "
            "several times, because it needs sums over parameters. Leave 'optimizer' out of offload."
        )


def speed_up_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.zero_grad()`` bypass the shards' dispatch, for speed. Idempotent."""
    reference = weakref.ref(optimizer)

    @without_shard_dispatch
    def zero_grad(set_to_none: bool = True) -> None:
        own = reference()
        assert own is not None
        type(own).zero_grad(own, set_to_none)

    optimizer.__dict__["zero_grad"] = zero_grad


def check_members(groups: list[dict[str, Any]], name: str, find: Callable[[Tensor], Any]) -> None:
    """Raise :class:`UnsupportedError` if the optimizer holds a parameter that ``find`` does not know."""
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if find(param) is None:
                raise UnsupportedError(
                    f"Parameter {position} of group {number} in {name} (shape "
                    f"{tuple(param.shape)}) does not belong to the model, so its gradients would not be reduced over "
                    "ranks. Register it as a parameter of the LightningModule, and create "
                    "optimizers from self.parameters() inside configure_optimizers(). A layer that was replaced or "
                    "grown after the model was sharded is not sharded: let trainer.fit() end, call "
                    "lightning_zero.unshard(model) on every rank, replace the layer, and fit again. That fit() calls "
                    "configure_optimizers() once more, so all optimizer state starts anew."
                )
