"""What a user hears of decisions about memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch.distributed as dist

from lightning_zero.budget.plan import MemoryPlan
from lightning_zero.config import EngineConfig
from lightning_zero.config.text import format_gib
from lightning_zero.profiling.headroom import DeviceMemory

__all__ = ["MemoryReporter", "option"]


class MemoryReporter:
    """Of one engine.

    Args:
        report: shows a line to the user.
        group: of all ranks, of which the first one warns.
    """

    def __init__(self, report: Callable[[str], None], group: dist.ProcessGroup) -> None:
        self.report = report
        self._group = group

    def budget(self, memory: DeviceMemory, room: float, until: str, fits: bool) -> None:
        """Of weights alone: ``room`` bytes were left on every rank beside ``memory``, the peak of some steps; and
        whether another weight fits in."""
        how_long = "until the optimizer steps" if until == "step" else "from forward to backward"
        done = f"keeping weights {how_long} within that; compiling once more" if fits else "no further weight fits in"
        self.report(
            f"reshard_after_forward='auto': {format_gib(memory.reserved)} GiB reserved at the peak of the steps that were "
            f"measured and {format_gib(memory.others)} GiB taken by others, of {format_gib(memory.total)}; {format_gib(max(room, 0.0))} "
            f"left on every rank; {done}."
        )

    def no_device(self, config: EngineConfig, auto: bool) -> None:
        """Nothing can be decided; ``auto``: weights were to stay as far as they fit."""
        why = "this device does not tell how much memory it has"
        if auto:
            self.report(f"reshard_after_forward='auto' keeps no parameters: {why}.")
        if config.memory == "auto":
            self.report(f"memory='auto' changes nothing: {why}. Give a number of GiB.")

    def never_quiet(self, config: EngineConfig, most: int, wanted: int) -> None:
        """In ``most`` steps there were never so many in a row that could be measured."""
        what, instead = ("nothing", "") if config.memory is not None else ("no parameters", "Set unsharded_cache_mb")
        self.report(
            f"{option(config)} keeps {what}: in {most} steps there were never {wanted} in a row in which compiled code "
            f"ran and nothing was compiled. {instead or 'What is planned stays'} to keep some."
        )

    def plan(self, plan: MemoryPlan, config: EngineConfig, told_first: bool) -> bool:
        """``told_first``: the user knows already that the first step took too much. Whether he knows now, if not."""
        self.report(str(plan))
        first = not told_first and (plan.first_step or 0) > plan.limit
        if first or plan.steady > plan.limit:
            self.warn(
                f"{option(config)} cannot be held: {format_gib(plan.missing)} GiB more are needed "
                f"({plan.in_words()}). {plan.instead()}"
            )
        return first

    def warn(self, line: str) -> None:
        """Once, whatever the number of ranks."""
        if dist.get_rank(self._group) == 0:
            warnings.warn(line, stacklevel=2)


def option(config: EngineConfig) -> str:
    """The one that made somebody decide."""
    return f"memory={config.memory!r}" if config.memory is not None else "reshard_after_forward='auto'"
