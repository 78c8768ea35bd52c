"""Between a user's options and a plan: what may be chosen, what there is to begin with, and what a choice comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from lightning_zero.budget.facts import Constraints, MemoryConfig
from lightning_zero.config import EngineConfig
from lightning_zero.config.options import Tuning
from lightning_zero.config.schema import OFFLOAD_CHOICES

__all__ = ["apply_memory_config", "memory_config", "constraints_of"]

MIB = 2**20
BUFFER_MB = Tuning().offload_buffer_mb  # which nobody has chosen


def memory_config(config: EngineConfig, away: Iterable[str] = ()) -> MemoryConfig:
    """What the options say by themselves, where no plan is. ``away``: what is on the host, whatever they say."""
    offload = tuple(name for name in OFFLOAD_CHOICES if name in {*config.offload, *away})
    over = bool(config.tuning.grad_aliasing)
    return MemoryConfig(config.activation_memory_budget, offload, until=config.unsharded_cache_until, over_copies=over)


def constraints_of(config: EngineConfig, may_leave: Iterable[str] = ()) -> Constraints:
    """What a plan may choose: whatever is as by default. What is set to something else is fixed, and what nobody has a
    say in, as no weights stay of code that is not compiled.

    Args:
        may_leave: what can go to the host in this training, of the names that ``offload`` takes.
    """
    tuning = config.tuning
    planned = config.memory is not None
    kept = (
        config.stage == 3
        and tuning.prefetch
        and tuning.unsharded_cache_mb is None
        and bool(config.reshard_after_forward)
    )
    return Constraints(
        activations=planned and config.compile and config.activation_memory_budget == 1.0 and tuning.recompute is None,
        weights=config.compile and kept and (planned or config.reshard_after_forward == "auto"),
        offload=tuple(may_leave) if planned and not config.offload else None,
        gradients=planned and config.stage == 3,
        ring=planned and tuning.offload_buffer_mb == BUFFER_MB,
        over_copies=planned and tuning.grad_aliasing is None and config.may_alias_gradients,
    )


def apply_memory_config(config: EngineConfig, chosen: MemoryConfig) -> EngineConfig:
    """The options with what was chosen in their places; how many weights stay is no option, but measured."""
    same = set(chosen.offload) == set(config.offload)
    offload = config.offload if same else chosen.offload
    budget, tuning = chosen.activation_memory_budget, config.tuning
    if chosen.ring:
        tuning = replace(tuning, offload_buffer_mb=chosen.ring / MIB)
    if chosen.over_copies:
        tuning = replace(tuning, grad_aliasing=True)
    return replace(config, activation_memory_budget=budget, offload=cast(Any, offload), tuning=tuning)
