"""Decide in which dtype each optimizer's state is stored (``state_dtype="bf16"`` or ``"8bit"``).

State of a parameter with few elements, and state that the next step needs exactly, stays as the optimizer makes it.
With ``bf16_stochastic_round``, all other state of bfloat16 weights is bfloat16, too, and rounded as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.config.options import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import STATE_DTYPE, keeps_bf16_state, noise_bits, stochastic_round
from lightning_zero.optim.quantized_state import (
    NONNEGATIVE,
    SCALE_BYTES,
    SIGNED,
    codes_key,
    fill_quantized,
    is_quantized,
    keeps_quantized_state,
    pack_entries,
    quantize,
    scales_key,
    unpack_entries,
)
from lightning_zero.optim.reduction_rules import ReductionRule, of_parameter
from lightning_zero.optim.update_rules import AnyRule, MatrixRule, begins_by_rule, has_rules, rule_for
from lightning_zero.sharding.layout import ShardLayout, as_real
from lightning_zero.sharding.param_record import ShardedParameter

StoredDtypes = Mapping[str, torch.dtype]  # by name of the state; an integer dtype is that of 8-bit codes
Find = Callable[[Tensor], ShardedParameter | None]


class Rounding(NamedTuple):
    """The options that name the values that a step rounds.

    Attributes:
        state_dtype: The option of this name.
        weights: The option ``bf16_stochastic_round``.
    """

    state_dtype: str | None = None
    weights: bool = False

    @classmethod
    def of(cls, tuning: Tuning) -> Rounding:
        return cls(tuning.state_dtype, tuning.bf16_stochastic_round)

    def rounds_weights(self, dtype: torch.dtype) -> bool:
        """Return True if weights of this dtype are rounded stochastically."""
        return self.weights and dtype is STATE_DTYPE


NO_ROUNDING = Rounding()


def stored_dtypes(rule: AnyRule | None, layout: ShardLayout, dtype: torch.dtype, rounding: Rounding) -> StoredDtypes:
    """Return the dtypes of a parameter's state that is rounded after a step, by name.

    Args:
        dtype: Of the parameter.
    """
    if rule is None:
        return {}
    rule = of_parameter(rule, layout.shape, dtype)
    codes = _code_dtypes(rule) if rounding.state_dtype == "8bit" and keeps_quantized_state(layout, dtype) else {}
    narrow = rounding.state_dtype == "bf16" and keeps_bf16_state(layout.numel, dtype)
    if narrow or rounding.rounds_weights(dtype):
        return {name: codes.get(name, STATE_DTYPE) for name in rule.state}
    return codes


def stored_bytes(dtype: torch.dtype) -> float:
    """Return the bytes per element of state that is stored in ``dtype``, with scales of codes."""
    return dtype.itemsize + (SCALE_BYTES if is_quantized(dtype) else 0.0)


def round_state(name: str, value: Tensor, dtype: torch.dtype, noise: Tensor, number: int) -> dict[str, Tensor]:
    """Return the tensors that store new state, stochastically rounded, by key.

    Args:
        value: float32; of shape (blocks, 256) if ``dtype`` is that of codes.
        noise: of :func:`block_noise` for codes, otherwise of :func:`rounding_noise`.
        number: of the state among those that share the noise.
    """
    if not is_quantized(dtype):
        return {name: stochastic_round(value, noise, number)}
    codes, scales = quantize(value, dtype, noise_bits(noise, number).to(torch.int32))
    return {codes_key(name): codes, scales_key(name): scales}


def fill_state(tensors: Sequence[Tensor], value: float) -> None:
    """Set all values of one state, given by its tensor, or by its codes and scales, to ``value``.

    Do nothing without tensors.
    """
    if len(tensors) == 2:
        codes, scales = tensors
        fill_quantized(codes, scales, value)
    elif tensors:
        as_real(tensors[0]).fill_(value)


def stored_dtypes_by_index(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], find: Find, rounding: Rounding
) -> dict[int, StoredDtypes]:
    """Return :func:`stored_dtypes` of each parameter that has any, by parameter index."""
    found: dict[int, StoredDtypes] = {}
    for group in groups if any(rounding) else ():
        rule = rule_for(optimizer, group)
        for param in group["params"]:
            record = find(param)
            if record is None:
                continue
            if dtypes := stored_dtypes(rule, record.layout, param.dtype, rounding):
                found[record.index] = dtypes
    return found


def _code_dtypes(rule: AnyRule) -> StoredDtypes:
    if isinstance(rule, ReductionRule):
        return {}
    if isinstance(rule, MatrixRule):
        return dict.fromkeys(rule.state, SIGNED)
    return {name: NONNEGATIVE if name in rule.nonnegative else SIGNED for name in rule.state if name not in rule.exact}


def restore_state_dtypes(optimizer: torch.optim.Optimizer, find: Find, state_dtype: str | None) -> None:
    """Convert state that ``state_dtype`` has stored in fewer bytes back to its parameter's dtype."""
    dtypes = stored_dtypes_by_index(optimizer, optimizer.param_groups, find, Rounding(state_dtype))
    for param, entries in optimizer.state.items():
        record = find(param)
        if record is None:
            continue
        unpack_entries(entries, param.dtype)
        for key in dtypes.get(record.index, ()):
            if isinstance(entries.get(key), Tensor):
                entries[key] = entries[key].to(param.dtype)


def pack_own_state(state: Mapping[Any, Any], find: Find, dtypes: Mapping[int, StoredDtypes]) -> None:
    """Quantize float state that should be in 8 bits, such as state that a user has put there."""
    for param, entries in state.items():
        record = find(param) if isinstance(param, Tensor) else None
        codes = {} if record is None else dtypes.get(record.index, {})
        pack_entries(entries, {name: dtype for name, dtype in codes.items() if is_quantized(dtype)})


def check_rounding(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], rounding: Rounding) -> None:
    """Raise :class:`UnsupportedError` if state or weights cannot be rounded as the options demand."""
    if rounding.weights:
        _check_weights(optimizer, groups)
    if rounding.state_dtype is not None:
        _check_state(optimizer, groups, rounding.state_dtype)


def no_bf16_weights_error(dtypes: set[torch.dtype]) -> UnsupportedError:
    """Return the error for ``bf16_stochastic_round`` without bfloat16 weights."""
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
    return UnsupportedError(
        f"bf16_stochastic_round=True rounds bfloat16 weights, but the dtypes of the trained ones are: {kinds}. Pass "
        "precision='bf16-true', or leave it out."
    )


def _check_weights(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    name = type(optimizer).__name__
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if dtypes and STATE_DTYPE not in dtypes:
        raise no_bf16_weights_error(dtypes)
    if not has_rules(optimizer, groups):
        raise UnsupportedError(
            f"bf16_stochastic_round=True needs the update rule of {name}, which is not known (only those of "
            "torch.optim, no subclasses). Register it with lightning_zero.register_rule, or leave "
            "bf16_stochastic_round out."
        )
    if not all(begins_by_rule(rule_for(optimizer, group)) for group in groups):
        line = "pass dampening=0" if is_sgd(optimizer) else "give it Rule(initial=...)"
        raise UnsupportedError(
            f"bf16_stochastic_round=True needs a rule that makes the first step of {name}, too, but the rule does not "
            f"tell how its state begins. Please {line}, or leave bf16_stochastic_round out."
        )


def is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD)


def _check_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], state_dtype: str | None
) -> None:
    name, option = type(optimizer).__name__, f"state_dtype={state_dtype!r}"
    if not has_rules(optimizer, groups):
        raise UnsupportedError(
            f"state_dtype={state_dtype!r} rounds the state of {name} after each step, which needs its update rule. "
            "The rule is not known (only elementwise ones of torch.optim, no subclasses). "
            "Register it with lightning_zero.register_rule, or leave state_dtype out."
        )
    if any(param.dtype is torch.float64 for group in groups for param in group["params"]):
        form = "bfloat16" if state_dtype == "bf16" else "8 bits"
        raise UnsupportedError(
            f"{option} keeps the state of {name} in {form}, but its parameters are float64. Leave it out, "
            "or train in float32."
        )
    rules = [rule for rule in (rule_for(optimizer, group) for group in groups) if rule is not None and rule.state]
    if state_dtype == "8bit" and rules and not any(map(_code_dtypes, rules)):
        raise UnsupportedError(
            f"{option} would store nothing of {name} in 8 bits: its steps need exact state. Write "
            "Tuning(state_dtype='bf16'), or leave state_dtype out."
        )
