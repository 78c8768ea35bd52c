"""Which optimizers can be trusted with shards.

An optimizer sees a flat piece of each parameter. That is enough for any rule that treats elements one by one. A rule
that needs a parameter's shape, or a norm over it, would compute something else from a piece, without an error; such
optimizers are refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.rules import has_rules
from lightning_zero.sharding.shard_tensor import without_shard_dispatch

__all__ = [
    "INSTEAD",
    "check_capture",
    "check_members",
    "check_offload",
    "check_optimizer",
    "check_state_dict",
    "is_torch_optimizer",
    "large_tensors",
    "speed_up_zero_grad",
]

# What to do where an optimizer would train wrongly.
INSTEAD = "Use an optimizer that treats elements one by one, such as AdamW, Adam, SGD or Lion, or another strategy."

_NEEDS_FULL_PARAMETERS = {
    "Muon": "orthogonalises whole matrices",
    "Dion": "orthogonalises whole matrices",
    "Adafactor": "keeps row and column statistics of whole matrices",
    "AdaFactor": "keeps row and column statistics of whole matrices",
    "CAME": "keeps row and column statistics of whole matrices",
    "SM3": "keeps row and column statistics of whole matrices",
    "Shampoo": "preconditions with whole matrices",
    "SOAP": "preconditions with whole matrices",
    "KFAC": "preconditions with whole matrices",
    "PSGD": "preconditions with whole matrices",
    "GaLore": "projects whole matrices",
    "LAMB": "scales by the norm of whole parameters",
    "Lamb": "scales by the norm of whole parameters",
    "LARS": "scales by the norm of whole parameters",
    "AdamP": "projects on whole parameters",
    "SGDP": "projects on whole parameters",
    "LBFGS": "takes inner products over all parameters",
    "Prodigy": "takes inner products over all parameters",
    "DAdapt": "takes inner products over all parameters",
    "NovoGrad": "normalises by the norm of whole gradients",
    "AdamMini": "shares statistics over blocks of whole parameters",
    "Adam_mini": "shares statistics over blocks of whole parameters",
    "SparseAdam": "steps the rows that sparse gradients name",
}
# Families: anywhere in the name, as in SingleDeviceMuonWithAuxAdam.
_FAMILIES = ("GaLore", "Muon", "Shampoo", "Adafactor", "AdaFactor", "DAdapt")


def is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is one of torch's own, not a subclass."""
    return type(optimizer).__module__.startswith("torch.optim.")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`UnsupportedError`, naming the optimizer and the reason, if it needs whole parameters or steps them
    by another optimizer."""
    for cls in type(optimizer).__mro__:
        name = cls.__name__
        reason = _NEEDS_FULL_PARAMETERS.get(next((family for family in _FAMILIES if family in name), name))
        if reason is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__} {reason}, but each rank holds only a flat piece of every parameter, so it "
                f"would train wrongly. {INSTEAD}"
            )
    name = type(optimizer).__name__
    inner = next((type(v).__name__ for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)), None)
    if inner is not None:
        raise UnsupportedError(
            f"{name} steps parameters by another optimizer that it holds ({inner}), whose state no checkpoint of "
            f"sharded parameters would hold. Return the {inner} itself from configure_optimizers(), or put the rule "
            f"of {name} into a subclass of it."
        )
    if "_optimizer_step_post_hooks" not in vars(optimizer):
        raise UnsupportedError(
            f"{name} has not called torch.optim.Optimizer.__init__(), so its steps have no hooks, in which shards are "
            "made ready. Call super().__init__(params, defaults) in its __init__."
        )
    steps = any(group["params"] for group in optimizer.param_groups)  # Lightning has an optimizer of nothing
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
            f"The state_dict() of {name} is {{{keys}}}, and not 'state' and 'param_groups' as of torch.optim's, so it "
            f"cannot be put together from the pieces that each rank holds. {INSTEAD}"
        )
    numbers = range(sum(len(group["params"]) for group in optimizer.param_groups))
    others: dict[Any, Any] = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    others |= {key: value for key, value in packed["state"].items() if key not in numbers}
    for group in packed["param_groups"]:
        others |= {key: value for key, value in group.items() if key != "params"}
    for key, value in others.items():
        if large := large_tensors(value):
            raise UnsupportedError(
                f"The state_dict() of {name} holds {key!r} with a tensor of shape {tuple(large[0].shape)} that belongs "
                "to no parameter's state, so a checkpoint would hold rank 0's piece alone. Keep such tensors in "
                f"optimizer.state[param]. {INSTEAD}"
            )


def check_capture(optimizer: torch.optim.Optimizer, reason: str | None, option: str) -> None:
    """Raises :class:`UnsupportedError` where there is a reason why a step that must be captured cannot be. ``option``:
    what the user has set to True."""
    if reason is not None:
        raise UnsupportedError(
            f"{option}=True, but the step of {type(optimizer).__name__} cannot be captured: {reason}. "
            f"Pass {option}='auto' to step it eagerly where it must be."
        )


def check_offload(optimizer: torch.optim.Optimizer) -> None:
    """Raises :class:`UnsupportedError` for an optimizer whose state cannot lie on the host."""
    if not has_rules(optimizer, optimizer.param_groups):
        raise UnsupportedError(
            f"offload=('optimizer',) has optimizers step their parameters in parts, and whether "
            f"{type(optimizer).__name__} can do that is not known: its update rule is none of those that are known "
            "here (elementwise ones of torch.optim, no subclasses). lightning_zero.register_rule makes it known; "
            "otherwise leave 'optimizer' out of offload."
        )


def speed_up_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Makes ``optimizer.zero_grad()``, which comes each step and looks at each parameter twice, as quick as for
    ordinary parameters. Harmless when repeated."""
    of = weakref.ref(optimizer)

    @without_shard_dispatch
    def zero_grad(set_to_none: bool = True) -> None:
        own = of()
        assert own is not None
        type(own).zero_grad(own, set_to_none)

    optimizer.__dict__["zero_grad"] = zero_grad


def check_members(groups: list[dict[str, Any]], name: str, find: Callable[[Tensor], Any]) -> None:
    """Raises :class:`UnsupportedError` when an optimizer of that name holds a parameter of which ``find`` finds
    nothing."""
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
