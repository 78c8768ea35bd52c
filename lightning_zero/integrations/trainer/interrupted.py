"""Checkpoints that callbacks save after an exception (``save_on_exception``, ``OnExceptionCheckpoint``): all ranks are
needed for them, and one may have raised alone.

Lightning calls the callbacks before the strategy hears of the exception. A rank that saved by itself would wait at
another collective than those that still train, until both time out, and nobody would be told why. Here ranks that have
raised meet first: where all have come within a few seconds, and after the same step, they save together; otherwise
nothing is saved, a line says why, and the exception goes its way.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_zero.native.collector import pause_gc

__all__ = ["synchronize_exception_saves"]


def synchronize_exception_saves(trainer: pl.Trainer) -> None:
    """Of all callbacks of this Trainer. Harmless when repeated. What users have put there instead stays."""
    vars(trainer).setdefault("save_checkpoint", partial(_save, trainer))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # These do more than save: look for files together, make links.
        # The class of a mock, which a test may put there, has no such method.
        own = getattr(type(callback), "on_exception", pl.Callback.on_exception)
        if isinstance(callback, Checkpoint) and own is not pl.Callback.on_exception:
            vars(callback).setdefault("on_exception", partial(_on_exception, callback))


def _save(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    if trainer.interrupted and not _all_ranks_can_save(trainer):
        return
    # A save makes so many small objects that Python would look for garbage, for some 0.3 s of a training that waits.
    with pause_gc() if getattr(trainer.strategy, "saves_async", False) else nullcontext():
        type(trainer).save_checkpoint(trainer, *args, **kwargs)


def _on_exception(callback: Any, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    # a callback that would not save asks nobody: another one may be on the way
    if not getattr(callback, "save_on_exception", True) or _all_ranks_can_save(trainer):
        type(callback).on_exception(callback, trainer, *args, **kwargs)


def _all_ranks_can_save(trainer: pl.Trainer) -> bool:
    came = getattr(trainer.strategy, "all_ranks_can_save", None)  # it may be another Trainer's callback by now
    return came is None or came()
