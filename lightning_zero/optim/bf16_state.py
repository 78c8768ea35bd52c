"""Which state of an optimizer is kept in bfloat16, where ``state_dtype="bf16"`` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.rules import has_rules, rule_for
from lightning_zero.sharding.param_record import ShardedParameter

__all__ = [
    "STATE_DTYPE",
    "ROUNDING_COUNT",
    "check_bf16_state",
    "keeps_bf16_state",
    "bf16_state_names",
    "restore_state_dtype",
]

STATE_DTYPE = torch.bfloat16
MIN_NUMEL = 4096  # elements of a parameter: what is smaller saves nothing, and norms and biases are that small
ROUNDING_COUNT = "roundings"  # counts steps, in the state of optimizers that count none: each rounds with other noise


def keeps_bf16_state(numel: int, dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype, and of so many elements over all ranks, has its state so: however many ranks
    there are, it is the same that has."""
    return numel >= MIN_NUMEL and dtype in (torch.float32, torch.float16, torch.bfloat16)


def bf16_state_names(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    find: Callable[[Tensor], ShardedParameter | None],
) -> dict[int, tuple[str, ...]]:
    """By the indices of parameters, the names of their state that is kept so."""
    found = {}
    for group in groups:
        rule = rule_for(optimizer, group)
        names = rule.state if rule is not None else ()
        for param in group["params"]:
            record = find(param)
            if names and record is not None and keeps_bf16_state(record.layout.numel, param.dtype):
                found[record.index] = names
    return found


def restore_state_dtype(optimizer: torch.optim.Optimizer, find: Callable[[Tensor], ShardedParameter | None]) -> None:
    """Such state is in its parameter's dtype again, as optimizers make it."""
    names = bf16_state_names(optimizer, optimizer.param_groups, find)
    for param, entries in optimizer.state.items():
        record = find(param)
        for key in names.get(record.index, ()) if record is not None else ():
            if isinstance(entries.get(key), Tensor):
                entries[key] = entries[key].to(param.dtype)


def check_bf16_state(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises :class:`UnsupportedError` for an optimizer whose state, with these groups, cannot be kept so."""
    name = type(optimizer).__name__
    if not has_rules(optimizer, groups):
        raise UnsupportedError(
            f"state_dtype='bf16' has what {name} keeps rounded after each step, by the formula of its update, and that "
            "is none of those that are known here (elementwise ones of torch.optim, no subclasses). "
            "lightning_zero.register_rule makes it known; otherwise leave state_dtype out."
        )
    if any(param.dtype is torch.float64 for group in groups for param in group["params"]):
        raise UnsupportedError(
            f"state_dtype='bf16' keeps the state of {name} in bfloat16, beside parameters of float64. Leave it out, or "
            "train in float32."
        )
