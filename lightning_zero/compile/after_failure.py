"""What would have fitted, after a device had no memory left."""

from __future__ import annotations

from dataclasses import replace

from lightning_zero.budget.facts import MemoryConfig
from lightning_zero.budget.items import WEIGHTS
from lightning_zero.budget.options import constraints_of
from lightning_zero.budget.plan import MemoryPlan, choose_plan
from lightning_zero.compile.known import StepStats, EngineMemoryFacts, measured
from lightning_zero.config import EngineConfig
from lightning_zero.profiling.headroom import DeviceMemory, memory_limit

__all__ = ["after_failure"]


def after_failure(
    known: EngineMemoryFacts, config: EngineConfig, memory: DeviceMemory, now: MemoryConfig, stepped: bool, requested: int
) -> MemoryPlan:
    """By one rank's numbers alone; where nothing fits in the limit that is set, within the device.

    Args:
        known: what others than the compiler know.
        config: the options.
        memory: of the device.
        now: how it was spent.
        stepped: an optimizer has stepped, so that its state is there.
        requested: bytes that were asked for.
    """
    limit = memory_limit(config.memory if config.memory is not None else "auto", memory.total)
    states = 0 if "optimizer" in now.offload else known.states
    to_come = min(states, 0 if stepped else known.to_come)
    took = max(memory.allocated - known.fixed - (states - to_come), 0)
    peak = max(memory.taken, memory.total - requested) + requested + to_come
    free = constraints_of(replace(config, memory="auto"), (*known.may_leave, *known.before))
    later = () if now.weights else (WEIGHTS,)
    facts = measured(known, limit, StepStats(room=limit - peak, took=took), False, now)
    facts = replace(facts, source="estimated", weights=now.weights)
    within = choose_plan(facts, free, later)
    beyond = within if within.fits else choose_plan(replace(facts, limit=memory_limit("auto", memory.total)), free, later)
    return beyond if beyond.fits else within
