"""What all callbacks ask of the Trainer's strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

__all__ = ["zero_strategy"]


def zero_strategy(trainer: pl.Trainer, method: str, job: str) -> Any:
    """The Trainer's strategy.

    Args:
        method: of ``ZeroStrategy``, that the callback calls.
        job: what the callback does, beginning with its name.

    Raises:
        MisconfigurationException: the strategy has no such method: it is another one.
    """
    strategy = trainer.strategy
    if not hasattr(strategy, method):
        raise MisconfigurationException(
            f"{job}, but this is {type(strategy).__name__}. "
            "Pass Trainer(strategy='zero3_compile') after `import lightning_zero`, or remove the callback."
        )
    return strategy
