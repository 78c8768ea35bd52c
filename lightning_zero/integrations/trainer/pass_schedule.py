"""Change the graph passes of a strategy at given steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_zero.compile.passes import PassSpec
from lightning_zero.compile.passes.selection import Schedule


def zero_strategy(trainer: pl.Trainer, method: str, purpose: str) -> Any:
    """Return the Trainer's strategy.

    Raises:
        MisconfigurationException: The strategy has no such method, because it is of another kind.
    """
    strategy = trainer.strategy
    if not hasattr(strategy, method):
        raise MisconfigurationException(
            f"{purpose}, but this is {type(strategy).__name__}. "
            "Pass Trainer(strategy='zero3_compile') after `import lightning_zero`, or remove the callback."
        )
    return strategy


class PassSchedule(Callback):
    """Apply graph passes by optimizer step: ``PassSchedule([(0, names), (100, None)])``.

    ``PassSchedule(disable=["merge_reduces"])`` turns some off. A change of passes compiles everything once more.

    Args:
        entries: Pairs of a step (``trainer.global_step``) and the names of the passes that apply from it on, in order;
            None for the default ones, which also apply before the first entry.
            ``trainer.strategy.known_passes()`` lists the names.
        passes: Your own passes, registered first.
        disable: Names of passes that are off from the beginning, even if an entry has them; use it to find out if one
            of them causes a problem.

    Raises:
        MisconfigurationException: (in ``setup``) The strategy is no ``ZeroStrategy``, or the schedule cannot run.

    Examples:
        >>> from lightning_zero import PassSchedule
        >>> schedule = PassSchedule(disable=["merge_reduces"])  # pass it as Trainer(callbacks=[schedule])
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
