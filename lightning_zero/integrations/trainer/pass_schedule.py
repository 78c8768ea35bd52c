"""Changes the graph passes of a strategy at given steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_zero.compile.passes import PassSpec
from lightning_zero.compile.passes.selection import Schedule
from lightning_zero.integrations.trainer.lookup import zero_strategy

__all__ = ["PassSchedule"]


class PassSchedule(Callback):
    """Applies graph passes by optimizer step: ``PassSchedule([(0, names), (100, None)])``. Or switches some off:
    ``PassSchedule(disable=["merge_reduces"])``.

    What is compiled is compiled again where the passes change, which takes as long as the first time.

    Args:
        entries: pairs of a step (``trainer.global_step``) and the names of the passes that apply from it on, in order;
            None for the default ones, which also apply before the first entry.
            ``trainer.strategy.known_passes()`` lists the names.
        passes: your own passes, to be registered first.
        disable: names of passes that are switched off from the beginning, whichever the entries name; to find out
            whether one of them is to blame.

    Raises:
        MisconfigurationException: (in ``setup``) the strategy is no ``ZeroStrategy``, or the schedule cannot run.
    """

    def __init__(
        self,
        entries: Sequence[tuple[int, Sequence[str] | None]] = (),
        passes: Sequence[PassSpec] = (),
        disable: Sequence[str] = (),
    ) -> None:
        self._entries = list(entries)
        self._passes = list(passes)
        self._disable = disable
        self._schedule = Schedule(())

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = zero_strategy(trainer, "use_passes", "PassSchedule changes the graph passes of ZeroStrategy")
        try:
            for spec in self._passes:
                strategy.register_pass(spec)
            self._schedule = Schedule.of(self._entries, strategy.known_passes())
            if self._disable:
                strategy.disable_passes(self._disable)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.use_passes(self._schedule.at(trainer.global_step))
