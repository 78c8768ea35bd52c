"""Optimizer state in bfloat16 (``state_dtype="bf16"``), with stochastic rounding.

A value between two bfloat16 neighbors is rounded up with the probability that keeps its mean. Round-to-nearest would
stop an average that moves by less than half of bfloat16's resolution. Values that bfloat16 can represent do not change.

The noise is a hash of the parameter's name, the element's index in the full parameter and the step count. So it does
not depend on the number of ranks, on replay or eager execution, or on a resume. Words of 32 bits are stored in int64
and products stay below 2**63, because not every device has unsigned arithmetic and signed overflow is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.rules import has_rules, rule_for
from lightning_zero.sharding.record import ShardedParameter

__all__ = [
    "ROUNDING_COUNT",
    "STATE_DTYPE",
    "bf16_state_names",
    "check_bf16_state",
    "keeps_bf16_state",
    "restore_state_dtype",
]

STATE_DTYPE = torch.bfloat16
MIN_NUMEL = 4096  # elements of a parameter; smaller ones (norms, biases) would save almost no memory
ROUNDING_COUNT = "roundings"  # state key that counts steps for optimizers without a step count: the noise depends on it


def keeps_bf16_state(numel: int, dtype: torch.dtype) -> bool:
    """Return True if a parameter of this dtype and full size has bfloat16 state, on any number of ranks."""
    return numel >= MIN_NUMEL and dtype in (torch.float32, torch.float16, torch.bfloat16)


def bf16_state_names(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    find: Callable[[Tensor], ShardedParameter | None],
) -> dict[int, tuple[str, ...]]:
    """Return the names of each parameter's bfloat16 state, by parameter index."""
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
    """Convert bfloat16 state back to its parameter's dtype."""
    names = bf16_state_names(optimizer, optimizer.param_groups, find)
    for param, entries in optimizer.state.items():
        record = find(param)
        for key in names.get(record.index, ()) if record is not None else ():
            if isinstance(entries.get(key), Tensor):
                entries[key] = entries[key].to(param.dtype)


def check_bf16_state(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`UnsupportedError` if the optimizer's state cannot be kept in bfloat16."""
    name = type(optimizer).__name__
    if not has_rules(optimizer, groups):
        raise UnsupportedError(
            f"state_dtype='bf16' rounds the state of {name} after each step, which needs its update rule. The rule is "
            "not known (only elementwise ones of torch.optim, no subclasses). "
            "Register it with lightning_zero.register_rule, or leave state_dtype out."
        )
    if any(param.dtype is torch.float64 for group in groups for param in group["params"]):
        raise UnsupportedError(
            f"state_dtype='bf16' keeps the state of {name} in bfloat16, but its parameters are float64. Leave it out, or "
            "train in float32."
        )
